"""Sums of many units as unevaluated pairs of float32, so that no unit is lost in rounding.

A plain float32 sum of 1,281,167 aligned units of norm C can move by 1.6 C when one of them is
removed: every later partial sum rounds differently. The pair (sum, error) keeps what each addition
drops, so that removing a unit moves the pair by that unit and a rounding of second order.

Error-free transformations: Knuth, TAOCP vol. 2, section 4.2.2; Dekker 1971; Ogita, Rump and Oishi
2005, "Accurate sum and dot product".

Products that add up units, as matrix products do, round in an order that the hardware chooses. A
unit that is taken out moves all later ones to other places in them, and there are orders of units
in which all products then round alike; such sums are float64, whose rounding never adds up to much.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class Compensated(NamedTuple):
  """An unevaluated sum: the value is `sum + error`, leaf by leaf (float32 each)."""

  sum: PyTree
  error: PyTree


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (fl(a + b), what the rounding dropped); their sum is a + b exactly."""
  total = a + b
  b_virtual = total - a
  return total, (a - (total - b_virtual)) + (b - b_virtual)


def zeros_like(tree: PyTree) -> Compensated:
  """A zero pair with the shapes of `tree`, in float32."""
  # Two separate trees: the accumulator is donated, and a buffer can be donated only once.
  return Compensated(
    jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), tree),
    jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), tree),
  )


def of(tree: PyTree) -> Compensated:
  """A float32 tree as a pair."""
  return Compensated(tree, jax.tree.map(jnp.zeros_like, tree))


def add(a: Compensated, b: Compensated) -> Compensated:
  """Adds two pairs; the result is normalised (|error| is at most half an ulp of sum)."""
  pairs = jax.tree.map(_add_leaves, a.sum, a.error, b.sum, b.error)
  return _transpose(pairs, a.sum)


def sum_units(tree: PyTree) -> Compensated:
  """Sums leaves float32[B, ...] over their first axis into a pair of leaves float32[...]."""
  return _transpose(jax.tree.map(_sum_leaf, tree), tree)


def collapse(pair: Compensated) -> PyTree:
  """Rounds a pair to one float32 tree: at most half an ulp of the value is lost."""
  return jax.tree.map(jnp.add, pair.sum, pair.error)


def double_precision() -> contextlib.AbstractContextManager[Any]:
  """Within it, float64 is what it says, whatever jax is set to; also while a function is traced."""
  return jax.enable_x64(True)


def from_float64(x: jax.Array) -> Compensated:
  """float64[...] as a pair, to 2^-48 of it."""
  with double_precision():
    high = x.astype(jnp.float32)
    return Compensated(high, (x - high.astype(jnp.float64)).astype(jnp.float32))


def _add_leaves(a_sum, a_error, b_sum, b_error):  # type: ignore[no-untyped-def]
  total, dropped = two_sum(a_sum, b_sum)
  return two_sum(total, dropped + (a_error + b_error))


def _sum_leaf(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """float32[B, ...] -> pair of float32[...], by a tree of two-sums.

  No addition is plain: removing a unit moves all later ones to other places in the tree, and each
  place rounds differently.
  """
  if x.shape[0] == 1:
    return x[0], jnp.zeros_like(x[0])
  half = -(-x.shape[0] // 2)
  x = _pad_first_axis(x, 2 * half)
  return sum_pairs(*two_sum(x[:half], x[half:]))


def sum_pairs(total: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sums pairs of float32[B, ...] over their first axis into one pair of float32[...]."""
  while total.shape[0] > 1:
    half = -(-total.shape[0] // 2)
    total, error = _pad_first_axis(total, 2 * half), _pad_first_axis(error, 2 * half)
    total, error = _add_leaves(total[:half], error[:half], total[half:], error[half:])
  return total[0], error[0]


def _pad_first_axis(x: jax.Array, size: int) -> jax.Array:
  return jnp.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _transpose(pairs: PyTree, like: PyTree) -> Compensated:
  """A tree of (sum, error) tuples -> a Compensated of two trees."""
  total, error = jax.tree.transpose(jax.tree.structure(like), jax.tree.structure((0, 0)), pairs)
  return Compensated(total, error)
