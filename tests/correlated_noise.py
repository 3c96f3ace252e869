"""Noise that remembers: that of a step, and a part of the one before taken away again."""

import jax
import jax.numpy as jnp

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.transform import Noise


def two_bands(stddev, beta=0.5):
  """z_t - beta z_(t-1), a banded strategy of two bands; its state is the last noise."""

  def init(params):
    return jax.tree.map(jnp.zeros_like, params)

  def update(total, state, key):
    like = total.sum if isinstance(total, Compensated) else total
    fresh = add_noise(jax.tree.map(jnp.zeros_like, like), stddev, key)
    pair = total if isinstance(total, Compensated) else Compensated(total, jax.tree.map(
      jnp.zeros_like, total))  # fmt: skip
    noised = jax.tree.map(
      lambda s, e, new, old: s + e + new - beta * old, pair.sum, pair.error, fresh, state
    )
    return noised, fresh

  return Noise(init, update)
