"""How bytes and messages travel: frames on the local socket, and later links between nodes."""
