"""Pairs as whole numbers of a fixed unit, so that devices can be summed exactly, by one all-reduce.

An all-reduce of float32 rounds in an order that the hardware chooses, and drops what `compensated`
keeps; gathering the pairs of all devices to add them up one by one takes memory by the number of
devices. Whole numbers add up exactly, and in any order: the result is the same on any number of
devices and with any algorithm, bit for bit.

A value is (high 2^40 + middle 2^20 + low) unit, three int32, with unit = 2^-40 C', where C' is the
clip norm rounded up to a power of two. So the sum of 2^31 units of norm C still fits, and each
device rounds each coordinate by at most half a unit. Between neighbours that is at most
devices * sqrt(parameters) * unit in L2: below 2^-13 C for 2^11 devices and 2^30 parameters, which
is inside the margin that clipping leaves (`norms.CLIP_MARGIN`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.gradients.compensated import Compensated, two_sum

PyTree = Any

_BITS = 20
_HALF = 2 ** (_BITS - 1)

# How many values may be added before `from_fixed`: below 2^19 each, the lower parts stay in int32.
MAX_TERMS = 2**11


class FixedPoint(NamedTuple):
  """Whole numbers of the unit, in three parts (int32 each), leaf by leaf."""

  high: PyTree
  middle: PyTree
  low: PyTree


def to_fixed(pair: Compensated, clip_norm: float) -> FixedPoint:
  """Rounds a pair to a whole number of units, at most half a unit away.

  Args:
    pair: the sum of fewer than 2^31 units of norm at most `clip_norm`.
    clip_norm: the bound C of one unit.
  """
  scale = np.float32(2.0 ** -_exponent(clip_norm))
  parts = jax.tree.map(lambda s, e: _split(s * scale, e * scale), pair.sum, pair.error)
  return FixedPoint(*_transpose(parts, pair.sum, 3))


def from_fixed(total: FixedPoint, clip_norm: float) -> Compensated:
  """The pair nearest to a sum of at most MAX_TERMS values, to about 2^-48 of each coordinate."""
  scale = np.float32(2.0 ** _exponent(clip_norm))

  def leaf(high: jax.Array, middle: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, error = _as_pair(*_carried(high, middle, low))
    return total * scale, error * scale

  return Compensated(*_transpose(jax.tree.map(leaf, *total), total.high, 2))


def _exponent(clip_norm: float) -> int:
  return math.ceil(math.log2(clip_norm))


def _split(total: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """total + error, in units of C', as three whole numbers; only the last is rounded."""
  parts = []
  for _ in range(2):
    whole, whole_of_error = jnp.round(total), jnp.round(error)
    parts.append(whole.astype(jnp.int32) + whole_of_error.astype(jnp.int32))
    total, error = (total - whole) * 2.0**_BITS, (error - whole_of_error) * 2.0**_BITS
  # Both are below 2^20 and their sum is rounded once, but for the float32 rounding of the sum.
  whole, whole_of_error = jnp.round(total), jnp.round(error)
  rest = jnp.round((total - whole) + (error - whole_of_error))
  parts.append(whole.astype(jnp.int32) + (whole_of_error + rest).astype(jnp.int32))
  return _carried(*parts)


def _carried(
  high: jax.Array, middle: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The same number with the two lower parts in [-2^19, 2^19)."""
  carry = (low + _HALF) >> _BITS
  low, middle = low - (carry << _BITS), middle + carry
  carry = (middle + _HALF) >> _BITS
  return high + carry, middle - (carry << _BITS), low


def _as_pair(high: jax.Array, middle: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The number as a normalised pair of float32."""
  coarse = (high >> 12) << 12  # 31 bits do not fit in a float32, but 19 and 12 do
  total, error = two_sum(coarse.astype(jnp.float32), (high - coarse).astype(jnp.float32))
  total, dropped = two_sum(total, middle.astype(jnp.float32) * 2.0**-_BITS)
  rest = (error + dropped) + low.astype(jnp.float32) * 2.0 ** (-2 * _BITS)
  return two_sum(total, rest)


def _transpose(parts: PyTree, like: PyTree, count: int) -> tuple[PyTree, ...]:
  """A tree of tuples -> a tuple of trees."""
  return jax.tree.transpose(
    jax.tree.structure(like), jax.tree.structure(tuple(range(count))), parts
  )
