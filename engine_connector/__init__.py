"""How engines reach the store: the protocol they speak, its two sides, the included engine and adapters for others."""
