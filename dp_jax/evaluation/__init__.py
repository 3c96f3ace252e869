"""L3: what a model does on held-out data."""
