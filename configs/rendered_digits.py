"""Public pre-training for the digits demo: images that are rendered from fonts, no privacy.

Command:   python -m dp_jax train --config=configs/rendered_digits.py --workdir=runs/rendered
Time:      TIME
Expected:  ACCURACY
Then:      train --config=configs/digits.py
           --config.model.weights=runs/rendered/unprotected/params.safetensors
"""

from ml_collections import ConfigDict

from configs.digits import get_config as digits


def get_config() -> ConfigDict:
  """The model of configs/digits.py on 20,000 rendered digits."""
  config = digits()
  config.data.source = "rendered_digits"
  config.data.num_records = 20_000
  config.privacy.enabled = False
  config.privacy.epsilon = None
  config.privacy.delta = None
  config.privacy.sampling_rate = 0.0125
  config.train.steps = 800
  config.train.learning_rate = 0.05
  config.train.schedule = "cosine"
  config.train.warmup_steps = 20
  config.train.microbatch_size = 320
  config.train.ema = 0.99
  config.checkpoint.every = 200
  return config
