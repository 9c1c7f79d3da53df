"""For all tests."""

import os
import signal

import pytest

# Read when torch is imported, here and in child processes: threads of a matrix product that wait spinning slow everything
# down tenfold when the cores have other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts something in the background has it ignore Ctrl-C, and all that it starts: `make test &` would have
# children that cannot be interrupted, by tests either.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def interpreter_env() -> dict[str, str]:
    """For a process in which triton interprets kernels: whether it does, or compiles them, is settled when it is imported."""
    import numpy

    triton = pytest.importorskip("triton", reason="triton is installed on Linux only")
    triton_version, numpy_version = (tuple(map(int, x.__version__.split(".")[:2])) for x in (triton, numpy))
    if triton_version < (3, 9) and numpy_version >= (2, 4):
        pytest.skip(
            f"the interpreter of triton {triton.__version__} breaks on numpy {numpy.__version__}; use triton 3.9"
        )
    return os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
