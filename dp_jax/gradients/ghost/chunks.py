"""How many units at a time: patches that stay in a cache are several times faster to read."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical
from dp_jax.gradients.ghost.uses import Use

# Bytes of temporaries of one chunk. On a CPU the patches of one unit fit its cache, those of a
# batch do not; an accelerator is idle between chunks.
_PATCHES_ON_CPU = 4 * 2**20
_LARGEST = 2**28
# Bytes of copied operands of one part of a sum, on a CPU and elsewhere.
_COPIES_ON_CPU, _COPIES = 2**23, 2**28
_MOST_PARTS = 4
# Units that are added in plain float32: what n of them round, n^2 2^-24 C, is inside the margin.
_PLAIN_UNITS = 32


def units_at_a_time(bytes_per_unit: int, memory_budget: int, *, patches: bool = False) -> int:
  """How many units' temporaries may be held, at least one.

  Args:
    bytes_per_unit: of the temporaries.
    memory_budget: bytes.
    patches: whether these are written once and read once or twice.
  """
  limit = _PATCHES_ON_CPU if patches and jax.default_backend() == "cpu" else _LARGEST
  return max(1, min(limit, memory_budget) // max(1, bytes_per_unit))


def in_chunks(
  function: Callable[..., Any],
  arrays: Any,
  bytes_per_unit: int,
  memory_budget: int,
  *,
  patches: bool,
) -> Any:
  """Applies a function of a batch to a few units at a time.

  Args:
    function: (*arrays [n, ...]) -> a tree of arrays [n, ...], unit by unit.
    arrays: trees of arrays [B, ...].
    bytes_per_unit: of the temporaries that the function makes.
    memory_budget: bytes that these may take.
    patches: whether these are written once and read once or twice.
  """
  chunk = units_at_a_time(bytes_per_unit, memory_budget, patches=patches)
  units = jax.tree.leaves(arrays)[0].shape[0]
  if chunk >= units:
    return function(*arrays)

  def one(unit: Any) -> Any:
    batched = jax.tree.map(lambda x: x[None], unit)
    return jax.tree.map(lambda x: x[0], function(*batched))

  return jax.lax.map(one, tuple(arrays), batch_size=None if chunk == 1 else chunk)


def patch_bytes(use: Use) -> int:
  """Bytes of the patches of one unit, in float32."""
  groups, positions, inputs, _ = canonical.conv_sizes(use)
  return 4 * groups * positions * inputs


def part_of_units(units: int, copied: int, result: int) -> int:
  """How many units to add at a time, so that copies stay small.

  Args:
    units: their number.
    copied: bytes of the copies of all units.
    result: bytes of the sum, which is read and written once a part.
  """
  limit = _COPIES_ON_CPU if jax.default_backend() == "cpu" else _COPIES
  count = min(copied // limit, copied // max(1, result), _MOST_PARTS)
  return -(-units // max(1, count))


def sum_in_parts(
  function: Callable[..., Any], arrays: Any, scales: jax.Array, most: int, add: Callable[..., Any]
) -> Any:
  """Adds up a function of a few units at a time.

  Args:
    function: (arrays [n, ...], scales [n]) -> a sum over n units, where a scale of zero adds zero.
    arrays: trees of arrays [B, ...].
    scales: float32[B].
    most: units at a time, at least 1.
    add: of two such sums.
  """
  units = len(scales)
  count = -(-units // most)
  if count <= 1:
    return function(arrays, scales)
  size = -(-units // count)

  def body(i: jax.Array, total: Any) -> Any:
    start = jnp.minimum(i * size, units - size)  # the last part may begin with units of another
    some, kept = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), (arrays, scales)
    )
    kept = jnp.where(start + jnp.arange(size) >= i * size, kept, 0.0)
    return add(total, function(some, kept))

  # A loop: of parts in a row, XLA may make all copies at once.
  shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[:size], (arrays, scales)))
  return jax.lax.fori_loop(
    0, count, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  )


def divisor(number: int, at_most: int) -> int:
  """The largest divisor of a number that is not above a bound."""
  return next(d for d in range(min(number, max(1, at_most)), 0, -1) if number % d == 0)


def weighted_sum(grads: jax.Array, scales: jax.Array, exact: bool) -> Compensated:
  """sum_b scales_b g_b of instantiated gradients float32[B, ...].

  Few units are added plainly, and these sums as pairs; none plainly if `exact`.
  """
  units, numbers = scales.shape[0], math.prod(grads.shape[1:])
  size = 1 if exact else divisor(units, _PLAIN_UNITS)
  flat = grads.reshape(units // size, size, numbers)
  highest = jax.lax.Precision.HIGHEST
  parts = jnp.einsum("gb,gbn->gn", scales.reshape(-1, size), flat, precision=highest)
  return pairs.sum_units(parts.reshape(units // size, *grads.shape[1:]))
