"""A config file with every key at its default, for tests that set them on the command line."""

from dp_jax.config.files import base_config


def get_config():
  return base_config()
