"""For all tests."""

import os

# Read when torch is imported, here and in child processes: threads of a matrix product that wait spinning slow everything
# down tenfold when the cores have other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
