"""Noise as a transform: the same one in the trainer and in an optax chain, with a state or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from correlated_noise import two_bands

import dp_jax
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.optax_noise import as_optax
from dp_jax.gradients.noise.transform import independent

KEY = jax.random.key(7)
PARAMS = {"a": jnp.zeros(50), "b": jnp.zeros((3, 20))}


def test_independent_noise_is_add_noise_and_remembers_nothing():
  noise = independent(2.0)
  assert noise.init(PARAMS) == ()
  noised, state = noise.update(PARAMS, (), KEY)
  assert state == ()
  for name, value in add_noise(PARAMS, 2.0, KEY).items():
    np.testing.assert_array_equal(noised[name], value)
  with pytest.raises(ValueError, match="stddev"):
    independent(0.0)


def test_the_optax_transform_is_the_same_noise():
  transform, step = dp_jax.gaussian_noise(2.0, KEY), jax.random.fold_in(KEY, 0)
  noised, state = transform.update(PARAMS, transform.init(PARAMS), PARAMS)
  for name, value in add_noise(PARAMS, 2.0, step).items():
    np.testing.assert_array_equal(noised[name], value)
  assert int(state.count) == 1 and state.noise == ()


def test_what_noise_remembers_goes_through_an_optax_chain():
  transform = as_optax(two_bands(2.0), KEY)
  state, update = transform.init(PARAMS), jax.jit(transform.update)
  seen = []
  for _ in range(3):
    noised, state = update(PARAMS, state, PARAMS)
    seen.append(noised["b"])
  fresh = [add_noise(PARAMS, 2.0, jax.random.fold_in(KEY, t))["b"] for t in range(3)]
  expected = [fresh[0], fresh[1] - 0.5 * fresh[0], fresh[2] - 0.5 * fresh[1]]
  for found, wanted in zip(seen, expected, strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(state.noise["b"], fresh[2])
