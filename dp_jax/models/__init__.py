"""L2: models in Flax NNX, their weights, and their split into trained and frozen parameters."""
