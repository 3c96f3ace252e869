"""Numbers of the public API: those of numpy count, and True is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax
from dp_jax.config.run_config import Config
from dp_jax.gradients.clipping import sensitivity

KEY = jax.random.key(0, impl="threefry2x32")
SPEC = dp_jax.PrivacySpec(1.0, 1e-5)


def _loss(params, unit, key):
  del key
  return jnp.sum(params * unit)


def _config(section, **values):
  content = {"data": {"source": "digits"}, "train": {"steps": 1}}
  content[section] = {**content.get(section, {}), **values}
  return Config.from_dict(content)


REAL = {
  "clipped_grad": lambda x: dp_jax.clipped_grad(_loss, x),
  "sensitivity": lambda x: sensitivity(x, "zero_out"),
  "gaussian_noise": lambda x: dp_jax.gaussian_noise(x, KEY),
  "dp_sgd, stddev": lambda x: dp_jax.dp_sgd(0.1, x, KEY, 8.0),
  "dp_adam, batch": lambda x: dp_jax.dp_adam(0.1, 1.0, KEY, x),
  "dp_lamb, batch": lambda x: dp_jax.dp_lamb(0.1, 1.0, KEY, x),
  "PrivacySpec": lambda x: dp_jax.PrivacySpec(x, 1e-5),
  "Poisson": dp_jax.Poisson,
  "Mechanism, noise": lambda x: dp_jax.Mechanism(dp_jax.FullBatch(), x, 1),
  "Mechanism, clip norm": lambda x: dp_jax.Mechanism(dp_jax.FullBatch(), 1.0, 1, x),
  "config, clip norm": lambda x: _config("privacy", clip_norm=x),
  "config, learning rate": lambda x: _config("train", learning_rate=x),
}
WHOLE = {
  "Mechanism, steps": lambda x: dp_jax.Mechanism(dp_jax.FullBatch(), 1.0, x),
  "calibrate, steps": lambda x: dp_jax.calibrate(SPEC, dp_jax.FullBatch(), x),
  "config, steps": lambda x: _config("train", steps=x),
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_number_is_one_of_python_or_numpy(name):
  for one in (1.0, 1, np.float32(1), np.float64(1), np.int64(1)):
    REAL[name](one)
  for other in (True, np.True_, "1", None, 1 + 0j, float("nan"), float("inf")):
    with pytest.raises(ValueError):
      REAL[name](other)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_is_one_of_python_or_numpy(name):
  for one in (1, np.int64(1), np.uint8(1)):
    WHOLE[name](one)
  for other in (True, np.True_, "1", 1.5, float("nan"), 0, -1):
    with pytest.raises(ValueError):
      WHOLE[name](other)
