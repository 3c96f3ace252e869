"""The one place that draws privacy noise: `add_noise`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated, two_sum
from dp_jax.gradients.noise.gaussian import standard_normal
from dp_jax.gradients.noise.leaf_keys import leaf_keys
from dp_jax.gradients.options import is_number

PyTree = Any

# The noised sum is rounded to a grid of 2^-14 to 2^-15 of stddev. Much finer grids (2^-20) let the
# lattice of the float32 draw show; this one costs nothing in accuracy.
_GRID_BITS = 14


def add_noise(total: PyTree | Compensated, stddev: float, key: jax.Array) -> PyTree:
  """Adds Gaussian noise to a sum of clipped gradients, once, and rounds it to a public grid.

  Sum and noise are added and rounded in pair arithmetic, and only the rounded result becomes a
  float32; a function of the exact noised value, so post-processing of it.

  Args:
    total: leaves float[...], or a `Compensated` pair of such trees; float64 keeps 48 bits. Finite,
      as a sum of clipped gradients is: what is not finite is not hidden by noise, and stays NaN.
    stddev: standard deviation of the noise in each coordinate, in units of the gradient:
      noise_multiplier * clip_norm. A Python float between 1e-25 and 1e25.
    key: one typed key, used for this release and no other. Each leaf draws from the key with the
      hash of its path folded in, as `leaf_keys` gives it.

  Returns:
    The noised sum, leaves float32[...], all multiples of 2^(floor(log2 stddev) - 14).

  Raises:
    ValueError: if stddev is out of range, the key is not one typed key, or a leaf is not of real
      floating point numbers.

  Dwork et al. 2006, "Our data, ourselves"; the grid answers Mironov 2012.
  """
  check_stddev(stddev)
  check_key(key)
  total = float32_pair(total)
  sums, structure = jax.tree.flatten(total.sum)
  errors = jax.tree.leaves(total.error)
  noised = [
    _noised_leaf(s, e, float(stddev), k)
    for s, e, k in zip(sums, errors, leaf_keys(total.sum, key), strict=True)
  ]
  return jax.tree.unflatten(structure, noised)


def check_stddev(stddev: Any) -> None:
  """Refuses a standard deviation whose grid float32 does not hold.

  Raises:
    ValueError: naming the value and the range.
  """
  if not is_number(stddev) or not 1e-25 <= stddev <= 1e25:
    raise UserError(
      "stddev (noise_multiplier x clip_norm) must be a number between 1e-25 and 1e25, got"
      f" {stddev!r}."
    )


def is_tracing() -> bool:
  """Whether it is called while a function is traced: then even the sum of constants is a tracer."""
  return isinstance(jax.lax.add(np.float32(0), np.float32(0)), jax.core.Tracer)


def check_key(key: Any) -> None:
  """Refuses what is not one typed key."""
  if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    raise UserError("key must be a typed key: jax.random.wrap_key_data of secret bits.")
  if key.ndim != 0:
    raise UserError(f"key must be a single key, got an array of keys of shape {key.shape}.")


def float32_pair(total: PyTree | Compensated) -> Compensated:
  """A sum as a pair of trees of float32[...], whatever floating point its leaves come in.

  Raises:
    ValueError: if a leaf is not of real floating point numbers.
  """
  if not isinstance(total, Compensated):
    total = Compensated(total, jax.tree.map(lambda _: np.float32(0), total))
  leaves, structure = jax.tree.flatten(total.sum)
  errors = jax.tree.leaves(total.error)
  both = [_float32_leaf(s, e) for s, e in zip(leaves, errors, strict=True)]
  return Compensated(*(jax.tree.unflatten(structure, [pair[i] for pair in both]) for i in (0, 1)))


def _float32_leaf(total: Any, error: Any) -> tuple[jax.Array, jax.Array]:
  """A leaf and its error as two float32 of one shape, whatever floating point they come in."""
  total, error = (jnp.asarray(x, jnp.float32) if isinstance(x, float) else jnp.asarray(x)
                  for x in (total, error))  # fmt: skip
  for x in (total, error):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise UserError(f"noise is added to real floating point numbers, got {x.dtype}.")
  if jnp.float64 in (total.dtype, error.dtype):
    with pairs.double_precision():
      total, error = pairs.from_float64(total.astype(jnp.float64) + error)
  total, error = total.astype(jnp.float32), error.astype(jnp.float32)
  return total, jnp.broadcast_to(error, total.shape)


def _noised_leaf(total: jax.Array, error: jax.Array, stddev: float, key: jax.Array) -> jax.Array:
  """round((total + error + stddev * z) / grid) * grid, without rounding anything before that.

  Everything is measured in grids: |stddev z| < 2^19, and a sum of up to 2^41 is exact as a pair.
  """
  exponent = math.floor(math.log2(stddev)) - _GRID_BITS
  scale = np.float32(2.0**-exponent)
  # Rounded up, so that the noise is never less than what was accounted.
  per_grid = np.nextafter(np.float32(math.ldexp(stddev, -exponent)), np.float32(np.inf))
  high, low = standard_normal(key, total.shape)
  noise, noise_error = _two_product(high, per_grid)
  terms = [*two_sum(total * scale, error * scale), noise, noise_error + low * per_grid]
  whole = [jnp.round(term) for term in terms]
  fraction = sum((term - part for term, part in zip(terms, whole, strict=True)), jnp.float32(0))
  # The small integers add up exactly (all below 2^24), so that the last sum is the exact total
  # rounded once: it depends on the total alone, not on how the terms were split. Its zeros are
  # made one zero: the sign of a zero would tell whether all terms were negative zeros.
  total = whole[0] + (whole[1] + whole[2] + whole[3] + jnp.round(fraction))
  return jnp.where(total == 0, jnp.float32(0), total) * np.float32(2.0**exponent)


def _two_product(a: jax.Array, b: np.float32) -> tuple[jax.Array, jax.Array]:
  """(fl(a b), what the rounding dropped), by splitting both factors into 12 bits (Dekker 1971)."""
  product = a * b
  a_high, b_high = _upper_half(a), _upper_half(jnp.float32(b))
  a_low, b_low = a - a_high, b - b_high
  error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
  return product, error


def _upper_half(x: jax.Array) -> jax.Array:
  # By mask, not by Veltkamp's multiplication: no compiler can contract it.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
