"""Public pre-training for the digits: images that are rendered from fonts, no privacy.

Command:   python -m dp_jax train --config=configs/rendered_digits.py --workdir=runs/rendered
Time:      30 seconds on 2 cores.
Expected:  95.8% on other rendered digits; 92.7% on the scans, which it never saw.
"""

from ml_collections import ConfigDict

from dp_jax.config.shipped import beside

digits = beside(__file__, "digits")


def get_config() -> ConfigDict:
  """The model of configs/digits.py, four passes over 60,000 rendered digits."""
  config = digits()
  config.data.source = config.facts.source = "rendered_digits"
  config.data.num_records = 60_000
  config.privacy.enabled = False
  config.privacy.epsilon = None
  config.privacy.delta = None
  config.privacy.sampling_rate = None
  config.privacy.expected_batch_size = 128.0
  config.facts.hyperparameter_selection = None
  config.train.steps = None
  config.train.epochs = 4.0
  config.train.optimizer = "adam"
  config.train.learning_rate = 2e-3
  config.train.schedule = "cosine"
  config.task.kwargs.label_smoothing = 0.1
  config.train.weight_decay = 1e-4
  config.train.microbatch_size = 160
  config.checkpoint.every = 500
  return config
