"""The privacy noise: its sampler, its keys, and the one place that adds it."""
