"""The included paged-attention engine, small enough to read in an evening. It knows only `engine_connector.protocol`."""
