"""`python -m jaxserve` from a shell."""

import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_one_answer_from_the_shell() -> None:
    done = run("--prompt", "What is the capital of France?", "--max_tokens", "12")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("Why is the sky blue?",)])
def test_no_prompt_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode != 0 and 'jaxserve --prompt "' in done.stderr
