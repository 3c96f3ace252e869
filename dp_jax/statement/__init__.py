"""L3: the privacy record of a release, its sentences, and their verification. No JAX."""
