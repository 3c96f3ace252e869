"""L4: the one training loop, its configuration, checkpoints and releases."""
