"""Who may import whom: one table, and a walk over every import that is written.

Owns the direction of the dependencies. Never runs the code it checks, save for one
subprocess which imports all that must work without JAX.
"""

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jaxserve", "pallas_kernels", "experiments")

# Row: what it may import, the standard library and its own modules aside. Arrows chain:
# with core -> config and scheduling -> core, scheduling may import config as well.
# A row covers a module and those below it, unless a longer row does. The `__init__` of
# a package is a module of that name, so a package as a whole is no way around its rows.
# Packages from outside stand in the same table, so "numpy only" is nothing special.
ARROWS: dict[str, tuple[str, ...]] = {
    # The host, with numpy only.
    "jaxserve.fields": (),
    "jaxserve.config": ("numpy", "jaxserve.fields"),
    "jaxserve.sampling_params": ("jaxserve.fields",),
    "jaxserve.processors": ("jaxserve.config", "jaxserve.sampling_params"),
    "jaxserve.core": ("jaxserve.processors",),
    "jaxserve.validation": ("jaxserve.config", "jaxserve.sampling_params"),
    "jaxserve.moves": ("jaxserve.processors",),
    "jaxserve.block_count": ("jaxserve.core",),
    "jaxserve.scheduling": ("jaxserve.block_count", "jaxserve.moves"),
    "jaxserve.kv_tiers": ("jaxserve.moves", "numpy"),
    "jaxserve.workloads": ("jaxserve.core",),
    "jaxserve.metrics": ("jaxserve.core",),
    "jaxserve.kv_size": (),
    "jaxserve.outputs": ("jaxserve.metrics",),
    # The device.
    "pallas_kernels": ("jax", "numpy", "pallas_kernels.cpu"),
    "pallas_kernels.cpu": ("jax", "numpy", "numba", "llvmlite"),
    "jaxserve.models": (
        "jaxserve.models.base",
        "pallas_kernels",
        "jaxserve.config",
        "jaxserve.models.detokenizer",
        "flax",
        "gguf",
        "huggingface_hub",
        "safetensors",
        "tqdm",
    ),
    "jaxserve.models.base": ("jax", "jaxserve.config", "jaxserve.kv_tiers"),
    "jaxserve.device.__init__": (),
    "jaxserve.device.block_pool": ("jax", "numpy"),
    "jaxserve.device.processors": ("jax", "jaxserve.processors"),
    "jaxserve.device.sampling": ("jax", "numpy", "jaxserve.device.processors"),
    "jaxserve.device.state": (
        "jaxserve.device.block_pool",
        "jaxserve.device.sampling",
        "jaxserve.models",
        "jaxserve.core",
    ),
    "jaxserve.device.scoring": ("jaxserve.device.sampling", "jaxserve.core"),
    "jaxserve.device.step": ("jaxserve.device.state", "jaxserve.device.scoring"),
    "jaxserve.device.transfer": ("jaxserve.device.state",),
    # Text, on the host and without JAX.
    "jaxserve.models.chat_template": ("jinja2",),
    "jaxserve.models.tokenizer": ("jaxserve.models.chat_template", "tokenizers"),
    "jaxserve.models.detokenizer": ("jaxserve.models.tokenizer",),
    # Where a plan runs. The simulated executor knows no device.
    "jaxserve.executors.__init__": (),
    "jaxserve.executors.base": ("jaxserve.core", "jaxserve.moves"),
    "jaxserve.executors.link": ("jaxserve.moves",),
    "jaxserve.executors.cost_model": (
        "jaxserve.block_count",
        "jaxserve.executors.link",
    ),
    "jaxserve.executors.sim_executor": (
        "jaxserve.executors.base",
        "jaxserve.executors.cost_model",
    ),
    "jaxserve.executors.jax_executor": (
        "jaxserve.executors.base",
        "jaxserve.executors.cost_model",
        "jaxserve.device.step",
        "jaxserve.executors.transfers",
    ),
    "jaxserve.executors.worker": (),
    "jaxserve.executors.disk": ("jaxserve.executors.worker", "jaxserve.kv_tiers"),
    "jaxserve.executors.staging": ("jax", "numpy"),
    "jaxserve.executors.transfers": (
        "jaxserve.executors.disk",
        "jaxserve.executors.staging",
        "jaxserve.device.step",
        "jaxserve.device.transfer",
        "jaxserve.moves",
        "jaxserve.kv_tiers",
    ),
    # The loop and what stands on it. The engine knows executors by their protocol, and
    # models by theirs; it names the JAX one only to make it where it is given none.
    "jaxserve.live": ("jaxserve.models.detokenizer", "jaxserve.outputs"),
    "jaxserve.accounts": ("jaxserve.scheduling",),
    "jaxserve.reports": ("jaxserve.accounts",),
    "jaxserve.leaps": ("jaxserve.live", "jaxserve.reports"),
    "jaxserve.answers": ("jaxserve.live",),
    "jaxserve.snapshot": ("jaxserve.scheduling",),
    "jaxserve.intake": (
        "jaxserve.core",
        "jaxserve.models.base",
        "jaxserve.models.detokenizer",
        "jaxserve.processors",
        "jaxserve.validation",
    ),
    "jaxserve.clients": (
        "jaxserve.answers",
        "jaxserve.executors.base",
        "jaxserve.reports",
        "jaxserve.scheduling",
    ),
    "jaxserve.loop": ("jaxserve.clients", "jaxserve.leaps"),
    "jaxserve.engine": (
        "jaxserve.intake",
        "jaxserve.loop",
        "jaxserve.models.base",
        "jaxserve.snapshot",
        "jaxserve.executors.jax_executor",
    ),
    "jaxserve.simulation": (
        "jaxserve.engine",
        "jaxserve.executors.sim_executor",
        "jaxserve.workloads",
    ),
    "jaxserve.testing": ("jaxserve.simulation",),
    "jaxserve.prompts": ("jaxserve.models.tokenizer",),
    "jaxserve.llm": (
        "jaxserve.engine",
        "jaxserve.executors.jax_executor",
        "jaxserve.prompts",
    ),
    "jaxserve.rollout": ("jaxserve.engine", "jaxserve.prompts"),
    "jaxserve.adapters.__init__": (),
    "jaxserve.adapters.tunix": ("jaxserve.rollout", "flax", "tunix"),
    "jaxserve.adapters.lm_eval": ("jaxserve.llm", "lm_eval"),
    "jaxserve.streams": ("jaxserve.outputs",),
    "jaxserve.engine_thread": ("jaxserve.engine", "jaxserve.streams"),
    "jaxserve.async_engine": ("jaxserve.llm", "jaxserve.engine_thread"),
    "jaxserve.__init__": (
        "jaxserve.async_engine",
        "jaxserve.rollout",
        "jaxserve.simulation",
    ),
    "jaxserve.__main__": ("jaxserve.__init__", "absl"),
    "experiments": (
        "jaxserve.__init__",
        "jaxserve.kv_size",
        "absl",
        "matplotlib",
        "optax",
    ),
}


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the file behind each dotted name; a package's ends in `.__init__`."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path for path in files
    }


def row_of(name: str) -> str | None:
    """Returns the longest row that covers a module, or None if there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in ARROWS), None)


@functools.cache
def reach(row: str) -> frozenset[str]:
    """Returns the rows and the outside packages that arrows lead to, `row` included."""
    return frozenset({row}).union(*map(reach, ARROWS.get(row, ())))


def imports(
    name: str, tree: ast.AST, known: dict[str, pathlib.Path]
) -> Iterator[tuple[int, str]]:
    """Yields the line and the target of every import, nested and typing ones too."""

    def resolved(target: str) -> str:
        package = f"{target}.__init__"
        return package if package in known or target in PACKAGES else target

    def member(package: str, attribute: str) -> str:
        target = resolved(f"{package}.{attribute}")
        return target if target in known else resolved(package)

    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, resolved(alias.name)) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                here = name.split(".")[:-level] if level else []
                base = ".".join([*here, *([module] if module else [])])
                yield from (
                    (node.lineno, member(base, alias.name)) for alias in aliases
                )
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield node.lineno, resolved(target)


def violations(root: pathlib.Path) -> list[str]:
    """Returns a line for each import that the table forbids and each unknown module."""
    known = modules(root)
    found = []
    for name, path in sorted(known.items()):
        where = path.relative_to(root)
        row = row_of(name)
        if row is None:
            found.append(f"{where}: add {name} to ARROWS in tests/test_arrows.py")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, target in imports(name, tree, known):
            top = target.partition(".")[0]
            if top in sys.stdlib_module_names:
                continue
            end = row_of(target) if top in PACKAGES else top
            if end is None:
                found.append(f"{where}:{line}: {target} is not in ARROWS")
            elif end not in reach(row):
                found.append(f"{where}:{line}: {row} may not import {target}")
    return found


def test_no_import_runs_against_an_arrow() -> None:
    found = violations(ROOT)
    assert not found, "\n".join(found)


def test_the_arrows_make_no_loop() -> None:
    loops = [
        (row, other)
        for row in ARROWS
        for other in reach(row) - {row}
        if row in reach(other)
    ]
    assert loops == []


def test_every_arrow_ends_at_a_row_or_outside() -> None:
    ends = {end for arrows in ARROWS.values() for end in arrows}
    assert {e for e in ends if e.startswith(PACKAGES) and e not in ARROWS} == set()


def test_what_needs_no_jax_loads_none() -> None:
    """The walk sees no `import_module(name)` and no package's `__init__` on the way."""
    free = sorted(
        name
        for name in modules(ROOT)
        if (row := row_of(name)) and not reach(row) & {"jax", "flax"}
    )
    assert {"jaxserve.scheduling.scheduler", "jaxserve.metrics"} <= set(free)
    code = (
        "import importlib, sys\n"
        f"for name in {[name.removesuffix('.__init__') for name in free]}:\n"
        "    importlib.import_module(name)\n"
        "    loaded = {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
        "    assert not loaded, f'importing {name} loads {loaded}'\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("jaxserve/core.py", "import jax.numpy as jnp", "may not import jax.numpy"),
        ("jaxserve/core.py", "from jaxserve import metrics", "jaxserve.metrics"),
        ("jaxserve/core.py", "import jaxserve", "jaxserve.__init__"),
        ("jaxserve/config.py", "from .core import Request", "jaxserve.core"),
        ("jaxserve/config.py", "from . import core", "jaxserve.core"),
        ("jaxserve/metrics.py", "import tqdm", "may not import tqdm"),
        (
            "jaxserve/scheduling/budget.py",
            "from ..executors.cost_model import Cost",
            "jaxserve.executors.cost_model",
        ),
        (
            "jaxserve/scheduling/budget.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from jaxserve.engine import Engine",
            "budget.py:3: jaxserve.scheduling may not import jaxserve.engine",
        ),
        (
            "jaxserve/metrics.py",
            "def run():\n    from jaxserve.executors import jax_executor",
            "jaxserve.executors.jax_executor",
        ),
        (
            "jaxserve/metrics.py",
            "import importlib\nimportlib.import_module('jaxserve.models.loading')",
            "jaxserve.models.loading",
        ),
        ("jaxserve/executors/sim_executor.py", "import jax", "may not import jax"),
        (
            "jaxserve/device/block_pool.py",
            "from jaxserve.device import state",
            "jaxserve.device.state",
        ),
        ("pallas_kernels/api.py", "import jaxserve.core", "jaxserve.core"),
        ("jaxserve/llm.py", "from experiments import common", "experiments.common"),
        ("jaxserve/llm.py", "import tests.helpers", "may not import tests.helpers"),
        ("experiments/demo.py", "import tests", "may not import tests"),
        ("experiments/demo.py", "import common", "may not import common"),
        ("jaxserve/new.py", "", "add jaxserve.new to ARROWS"),
        ("jaxserve/llm.py", "import jaxserve.gone", "jaxserve.gone is not in ARROWS"),
    ],
)
def test_a_forbidden_import_is_found(
    tmp_path: pathlib.Path, path: str, line: str, complaint: str
) -> None:
    _write(tmp_path, {path: line})
    (found,) = violations(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("jaxserve/scheduling/budget.py", "import json, numpy.random"),
        ("jaxserve/scheduling/budget.py", "from ..config import EngineShape"),
        ("jaxserve/scheduling/budget.py", "from . import running"),
        ("jaxserve/engine.py", "from jaxserve.executors import base"),
        ("jaxserve/device/step.py", "from pallas_kernels.api import paged_attention"),
        ("experiments/demo.py", "from experiments import common"),
        ("experiments/demo.py", "from absl import app\nfrom jaxserve import LLM"),
    ],
)
def test_an_import_along_the_arrows_is_left_alone(
    tmp_path: pathlib.Path, path: str, line: str
) -> None:
    _write(tmp_path, {path: line})
    assert violations(tmp_path) == []


def _write(root: pathlib.Path, files: dict[str, str]) -> None:
    """Lays out a small tree of empty modules with `files` written over it."""
    empty = [
        "experiments/common.py",
        "jaxserve/__init__.py",
        "jaxserve/config.py",
        "jaxserve/core.py",
        "jaxserve/executors/__init__.py",
        "jaxserve/executors/base.py",
        "jaxserve/executors/cost_model.py",
        "jaxserve/executors/jax_executor.py",
        "jaxserve/device/__init__.py",
        "jaxserve/device/state.py",
        "jaxserve/metrics.py",
        "jaxserve/scheduling/__init__.py",
        "jaxserve/scheduling/running.py",
    ]
    for path, text in (dict.fromkeys(empty, "") | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
