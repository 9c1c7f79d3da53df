"""A slab of device memory that the engine processes on one GPU share. The sidecar owns its slots, engines copy."""
