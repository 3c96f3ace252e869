"""Private linear heads on frozen features, from a few noised statistics."""
