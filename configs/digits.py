"""Digits."""

from dp_jax.config_file import base_config


def get_config():
  config = base_config()
  config.data.source = "digits"
  config.data.declared = "public"
  config.model.widths = (32, 64)
  config.model.strides = (1, 2)
  config.model.groups = 8
  config.privacy.epsilon = 0.5
  config.privacy.delta = 1e-4
  config.privacy.sampling_rate = 0.25
  config.train.steps = 80
  config.train.learning_rate = 0.03
  config.train.ema = 0.9
  config.checkpoint.every = 20
  return config
