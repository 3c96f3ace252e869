"""Matrices of pairs of tokens of one unit, a part at a time where they would be large."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Pairs of tokens of one unit that are made at a time: 64 MB in float32.
_PAIRS = 2**24


def pairs_held(tokens: int, others: int) -> int:
  """Entries of a matrix of pairs of tokens that is made at a time, for one unit."""
  return min(tokens, max(1, _PAIRS // max(1, others))) * others


def by_tokens(function: Callable[..., Any], arrays: tuple[jax.Array, ...], others: int) -> Any:
  """Applies a function of some tokens to as many at a time as may meet all others.

  Args:
    function: (*arrays [B, t, ...]) -> a tree of arrays [B, t], token by token.
    arrays: arrays [B, T, ...].
    others: how many tokens each is paired with.
  """
  units, tokens = arrays[0].shape[:2]
  step = pairs_held(tokens, others) // max(1, others)
  if step >= tokens:
    return function(*arrays)
  count = -(-tokens // step)

  def blocks(x: jax.Array) -> jax.Array:
    """Zeros fill the last one; what they give is dropped."""
    padded = jnp.pad(x, [(0, 0), (0, count * step - tokens), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(padded.reshape(units, count, step, *x.shape[2:]), 1, 0)

  found = jax.lax.map(lambda some: function(*some), tuple(blocks(x) for x in arrays))
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(units, count * step)[:, :tokens], found
  )
