# Everything runs from .venv, which the first target that needs it makes.
BIN := .venv/bin
# The interpreter to make .venv with; empty takes the newest that fits.
PYTHON ?=
# More arguments for pytest or the demo, such as ARGS="-m slow" or ARGS="-k pool".
ARGS ?=
# Seeds the fuzz runs.
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz lint format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

setup: ## Make .venv from the pinned versions, once (PYTHON=python3.11 to choose)
	@PYTHON="$(PYTHON)" tools/setup.sh

demo: setup ## Run the demo (ARGS="..." for its flags)
	$(BIN)/python -m experiments.demo $(ARGS)

# Most of their time is compilation, on one core; a process takes up to 3 GB.
test: setup ## Run the tests (ARGS="-m slow" for the slow ones)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

fuzz: setup ## Run the long random tests (SEED=0)
	$(BIN)/python -m pytest -m fuzz --hypothesis-profile=fuzz --hypothesis-seed=$(SEED) $(ARGS)

lint: setup ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and build products
	rm -rf .venv .cache .hypothesis .pytest_cache .ruff_cache build demo dist results sweep static_vs_continuous *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
