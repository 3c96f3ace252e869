"""`python -m dp_jax COMMAND`."""

from dp_jax.cli import run

run()
