"""Other people's weights: reading them, and what they came from."""
