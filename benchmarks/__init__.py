"""Measurements that back the figures in the documents; run from the repository's root: `python -m benchmarks.<name>`."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as kvstore/demo/processes.py, before torch is imported
