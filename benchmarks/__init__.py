"""Measurements that back the figures in the documents; run from the repository's root: `python -m benchmarks.<name>`."""
