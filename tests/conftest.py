"""What holds for every test: a CPU, JAX's strict modes, seeded hypothesis.

JAX reads these variables when it is imported, and so do the programs that tests start.
"""

import gc
import os
import pathlib
import sys

import pytest
from hypothesis import settings

if "jax" in sys.modules:
    raise pytest.UsageError(
        "jax was imported before tests/conftest.py could set its flags; "
        "find the pytest plugin that imports it and disable it with -p no:NAME"
    )

# An implicit broadcast or promotion is a bug in waiting here: both raise.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The CPU kernels check what they are given.
os.environ["PALLAS_KERNELS_CHECKED"] = "1"

# Most of the suite's time is compilation. The cache holds the compiler's output only:
# tracing, jit's own caches and the compile events that tests count stay as they are.
_ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# No deadline: the first example of a test compiles, and no test judges by time.
settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def _programs():
    """Forget a module's programs after it.

    Each takes dozens of the 65,530 memory maps that Linux gives a process, and XLA
    crashes when there are no more.
    """
    yield
    import jax

    jax.clear_caches()
    gc.collect()
