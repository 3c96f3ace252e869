"""L4: the one training loop, its checkpoints and releases."""
