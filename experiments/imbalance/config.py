"""A linear classifier for the study of imbalance; the data are given by flags.

Command:   python -m experiments.imbalance.study --config=experiments/imbalance/config.py
           --config.data.path=mnist.npz
Time:      about 5 seconds a run on 2 cores.
Expected:  see README.md.
"""

from ml_collections import ConfigDict

from dp_jax.config.files import base_config


def get_config() -> ConfigDict:
  """Logistic regression on pixels or features: small, convex, the same for every class."""
  config = base_config()
  config.data.source = "npz"
  config.data.declared = "public"
  config.data.num_classes = 10
  config.model.name = "linear"
  config.model.head_init_std = 0.0
  config.privacy.delta = 1e-5
  config.privacy.sampling_rate = 0.02
  config.privacy.clip_norm = 1.0
  config.train.steps = 200
  config.train.learning_rate = 0.5
  config.train.schedule = "cosine"
  config.train.microbatch_size = 1536
  config.eval.every = 20
  config.checkpoint.every = 200
  return config
