"""L1: per-unit clipping, noise and optimizers, for any JAX function and any model library."""
