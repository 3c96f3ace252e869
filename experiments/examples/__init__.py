"""Examples: other people's models, tasks and training loops."""
