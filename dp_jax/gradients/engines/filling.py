"""A batch of units in blocks of one size, filled up where they do not divide it."""

import math
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def in_blocks(tree: PyTree, mask: jax.Array, shape: tuple[int, ...]) -> tuple[PyTree, jax.Array]:
  """Leaves [B, ...] and bool[B], B at least 1, as [*shape, ...] and bool[*shape].

  The filler repeats the last unit, so that it is a valid input; the mask makes it zero.
  """
  size, whole = mask.shape[0], math.prod(shape)

  def leaf(x: jax.Array) -> jax.Array:
    return x[jnp.minimum(jnp.arange(whole), size - 1)].reshape(*shape, *x.shape[1:])

  return jax.tree.map(leaf, tree), jnp.pad(mask, (0, whole - size)).reshape(shape)
