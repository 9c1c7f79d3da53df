"""Types and rules that everything else stands on: no torch, no sockets, no files (ARCHITECTURE.md, level L0)."""
