"""Blocks on drives: one data file and one index for each, written and read by threads of their own."""
