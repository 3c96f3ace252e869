"""The one place that draws privacy noise: `add_noise`, and an optax transform around it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated, two_sum
from dp_jax.gradients.noise.gaussian import standard_normal
from dp_jax.gradients.noise.key_state import own_copy, same_for_one_sum, stand_in
from dp_jax.gradients.noise.leaf_keys import leaf_keys
from dp_jax.gradients.optax_guards import (
  Shapes,
  ShapesSeen,
  check_injected,
  check_whole,
  check_wrappers,
  shapes_of,
)
from dp_jax.gradients.options import is_number

PyTree = Any

# The noised sum is rounded to a grid of 2^-14 to 2^-15 of stddev. Much finer grids (2^-20) let the
# lattice of the float32 draw show; this one costs nothing in accuracy.
_GRID_BITS = 14

# What a chain should start with, for messages.
_START = "dp_jax.gaussian_noise(stddev, key), optax.scale(1 / expected_batch_size)"


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
  _check_key(key)
  if not isinstance(total, Compensated):
    total = Compensated(total, jax.tree.map(lambda _: np.float32(0), total))
  sums, structure = jax.tree.flatten(total.sum)
  errors = jax.tree.leaves(total.error)
  noised = [
    _noised_leaf(*_float32_pair(s, e), float(stddev), k)
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


class NoiseState(NamedTuple):
  """State of `gaussian_noise`.

  Attributes:
    key: the typed key of the run; step t draws from fold_in(key, t).
    count: int32[], the number of releases so far.
  """

  key: jax.Array
  count: jax.Array  # type: ignore[assignment]  # the name optax uses


def gaussian_noise(stddev: float, key: jax.Array) -> optax.GradientTransformation:
  """An optax transform that adds noise to the sum of clipped gradients; put it first in a chain.

  The updates that it takes are the sum over the units of one logical batch, as `clipped_grad`
  returns it (plain or a `Compensated` pair). Divide by the public expected batch size after it.

  Args:
    stddev: noise_multiplier * clip_norm, a Python number.
    key: one typed key, never used elsewhere.

  Returns:
    A GradientTransformation with a `NoiseState`. The key enters the state in `init`, as a copy, so
    that the state may be donated. `init` must not be compiled: a key that is closed over by a
    jitted function ends up in its executable, and so in the compilation cache on disk. Its shapes
    may be asked for (`jax.eval_shape`). Every state that it gives has the same key: for another
    model, or another run, make another transform. Nobody but you may see the state.

  Raises:
    ValueError: if stddev or key cannot serve; from `init`, if it is compiled (jit, scan) or under
      vmap; from `update`, if the shapes are not those of the parameters; from both, if a wrapper of
      optax stands around it that `dp_jax.gradients.optax_api` does not list.
  """
  check_injected()
  check_stddev(stddev)
  stddev = float(stddev)
  _check_key(key)
  seen = ShapesSeen()

  def init(params: PyTree) -> NoiseState:
    check_whole(params)
    check_wrappers(_START)
    seen.remember(params)
    state_key = stand_in(key) if is_tracing() else own_copy(key, params)
    return NoiseState(state_key, jnp.zeros((), jnp.int32))

  def update(updates: PyTree, state: NoiseState, params: PyTree = None) -> Any:
    check_whole(updates)
    check_wrappers(_START)
    _check_sum(updates, seen.expected(params))
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(updates)]
    step_key = jax.random.fold_in(same_for_one_sum(state.key, leaves), state.count)
    return add_noise(updates, stddev, step_key), NoiseState(state.key, state.count + 1)

  return optax.GradientTransformation(init, update)


def _check_sum(updates: PyTree, expected: set[Shapes] | None) -> None:
  """Refuses per-example gradients, whose noised rows would each be released."""
  got = shapes_of(updates.sum if isinstance(updates, Compensated) else updates)
  if expected is None or got in expected:
    return
  if not expected:
    raise UserError(
      "update needs the parameters, to see that the updates are a sum over units and not"
      " per-example gradients: call update(total, state, params)."
    )
  raise UserError(
    "a transform that adds noise takes the sum over units that clipped_grad returns, with the"
    f" shapes of the parameters; got {got}, the parameters have {' or '.join(map(str, expected))}."
    " For per-example gradients use differentially_private_aggregate."
  )


def is_tracing() -> bool:
  """Whether it is called while a function is traced: then even the sum of constants is a tracer."""
  return isinstance(jax.lax.add(np.float32(0), np.float32(0)), jax.core.Tracer)


def _check_key(key: Any) -> None:
  if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    raise UserError("key must be a typed key: jax.random.wrap_key_data of secret bits.")
  if key.ndim != 0:
    raise UserError(f"key must be a single key, got an array of keys of shape {key.shape}.")


def _float32_pair(total: Any, error: Any) -> tuple[jax.Array, jax.Array]:
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
