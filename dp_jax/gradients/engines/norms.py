"""Norms of per-unit gradients, and their scaling, shared by all engines."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Gradients are clipped to C (1 - 2^-10). Norm and scaling are computed in float32 with a relative
# error below 2^-12 (see _SQUARES_PLAIN), so that what is summed stays within C itself.
CLIP_MARGIN = 2.0**-10

# Terms of a norm that are added in plain float32 (relative error at most n 2^-24 in the square,
# half of that in the norm); longer vectors are first added up in blocks.
_SQUARES_BLOCK = 1024
_SQUARES_PLAIN = 2048

# Beyond these, reciprocals and ratios leave the normal range of float32, which hardware may flush
# to zero: a unit of 2^126 divided by its largest entry would then have norm zero.
_LARGEST_ENTRY = 2.0**120
_SMALLEST_ENTRY = 2.0**-120
LARGEST_RATIO = 2.0**100
# Between these, no single square that matters has left the range either.
_SMALLEST_SQUARE, _LARGEST_SQUARE = 2.0**-60, 2.0**120


def per_unit_norms(grads: PyTree) -> jax.Array:
  """L2 norms over all leaves, float32[B].

  Each unit is scaled by its largest entry first, so that squares neither overflow nor vanish. The
  norm is infinite or NaN where a unit holds an entry that is not finite or not below 2^120.
  """
  leaves = [g.reshape(g.shape[0], -1) for g in jax.tree.leaves(grads)]
  largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g), axis=1, initial=0.0) for g in leaves]), axis=0)
  usable = (largest > _SMALLEST_ENTRY) & (largest < _LARGEST_ENTRY)
  safe = jnp.where(usable, largest, 1.0)
  squares = [sum_of_squares(g / safe[:, None]) for g in leaves]
  norms = safe * jnp.sqrt(jnp.sum(jnp.stack(squares), axis=0))
  return jnp.where(largest < _LARGEST_ENTRY, norms, jnp.where(jnp.isnan(largest), largest, jnp.inf))


def quick_norms(grads: PyTree, mask: jax.Array | None = None) -> jax.Array:
  """The same in one pass over the gradients, unless a unit's squares may have left float32's range.

  Only such a unit's norm is then computed in the slower way, so that none is rounded in another way
  because of another unit.

  Args:
    grads: leaves float32[B, ...].
    mask: bool[B]; the norms of padding (False) may be anything.
  """
  leaves = [g.reshape(g.shape[0], -1).astype(jnp.float32) for g in jax.tree.leaves(grads)]
  squares = jnp.sum(jnp.stack([sum_of_squares(g) for g in leaves]), axis=0)
  usable = (squares > _SMALLEST_SQUARE) & (squares < _LARGEST_SQUARE)  # false for NaN
  return jax.lax.cond(
    jnp.all(usable if mask is None else usable | ~mask),
    lambda: jnp.sqrt(squares),
    lambda: jnp.where(usable, jnp.sqrt(squares), per_unit_norms(leaves)),
  )


def total_norms(norms: jax.Array) -> jax.Array:
  """float32[G, B] -> float32[B]: the norm of all parts together, without overflow."""
  return per_unit_norms([norms.T])


def sum_of_squares(x: jax.Array) -> jax.Array:
  """float32[B, n] -> float32[B]. Plain sums of many equal terms stagnate; sums of blocks do not."""
  squares = jnp.square(x)
  while squares.shape[1] > _SQUARES_PLAIN:
    whole = squares.shape[1] - squares.shape[1] % _SQUARES_BLOCK
    blocks = squares[:, :whole].reshape(squares.shape[0], -1, _SQUARES_BLOCK)
    # The barrier keeps a compiler from merging the two sums into one.
    sums = jax.lax.optimization_barrier(jnp.sum(blocks, axis=2))
    squares = jnp.concatenate([sums, squares[:, whole:]], axis=1)
  return jnp.sum(squares, axis=1)


def scaled(grads: jax.Array, scales: jax.Array) -> jax.Array:
  """Multiplies float32[B, ...] by float32[B]; a scale of zero gives zero, whatever the gradient.

  Selects before it multiplies: 0 * NaN is NaN, and padding may hold anything.
  """
  scales = scales.reshape(-1, *(1,) * (grads.ndim - 1))
  return jnp.where(scales != 0, grads, 0.0) * scales
