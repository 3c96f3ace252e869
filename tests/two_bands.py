"""Correlated noise for tests: noise that keeps something from one step to the next."""

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.transform import Noise


def two_bands(beta):
  """Of step t, z_t + beta z_(t-1), where the z are independent; it keeps the last z."""

  def make(stddev):
    def update(total, last, key):
      total = pairs.add(total, pairs.of(jax.tree.map(lambda z: beta * z, last)))
      fresh = add_noise(jax.tree.map(jnp.zeros_like, last), stddev, key)
      return add_noise(total, stddev, key), fresh

    return Noise(lambda params: jax.tree.map(jnp.zeros_like, params), update)

  return make
