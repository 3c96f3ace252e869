"""Sums of per-unit statistics with a bound on what one unit adds, as compensated pairs.

The statistic of a unit is the mean over its records, so its norm is at most that of the largest
record's. Every record's row is clipped to norm R first. Then a unit adds to

* the sum of rows: a vector of norm at most R;
* the second moment, sum of x x^T: a matrix of Frobenius norm at most R^2;
* the cross moment, sum of x y^T with a one-hot y: a matrix of Frobenius norm at most R;
* weighted second moments, one matrix h_c x x^T a class: R^2 |h|, where |h| is at most the bound on
  the weights, all matrices taken together.

These are the sensitivities under zero_out and add_or_remove_one, where a unit is there or is not.
Under replace_one the contributions A and B of two units take each other's place. In general they
differ by at most twice the bound, as x and -x do. Positive semidefinite ones cannot be opposite:

  <A, B> = tr(A B) = ||A^(1/2) B^(1/2)||^2 >= 0, in Frobenius norm, so that
  ||A - B||^2 = ||A||^2 + ||B||^2 - 2 <A, B> <= ||A||^2 + ||B||^2,

and second moments move by at most sqrt(2) R^2, which rows at right angles reach. With weights of at
least 0 every h_c x x^T is positive semidefinite, and <A, B> is a sum over classes of such terms, so
all matrices together move by at most sqrt(2) R^2 |h|. Weights of both signs would give 2 R^2 |h|.

The smallest eigenvalue of the second moment moves by at most R^2 under replace_one too. With S the
sum over all other units, and A positive semidefinite, Weyl's inequality (Horn and Johnson 2013,
Matrix Analysis, theorem 4.3.1) gives

  smallest(S) <= smallest(S + A) <= smallest(S) + largest(A) <= smallest(S) + R^2,

and the same for B: both lie in one interval of length R^2.

Matrices are summed over blocks of `BLOCK` rows by a plain float32 product, and blocks as pairs. The
sum of a block rounds by at most BLOCK * 2^-24 times the sum of its terms' norms, so by
BLOCK^2 * 2^-24 bounds (blocks that share a unit round by less together, since the units in them
then have three rows or more). Twice that, once for each neighbour, is taken off the bound
beforehand; two sums round under replace_one too, and they may move by no less. That is enough where
neighbours keep every unit in its place. A unit that is taken out moves all later ones to other
blocks, and in an order of units that is made for it all blocks then round alike (1.03 bounds for
2^18 units); where neighbours may lack a unit, `exact` products are float64.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.norms import CLIP_MARGIN, per_unit_norms, scaled
from dp_jax.solvers.feature_units import Rows, Units

# By how many bounds an exchange moves a sum of positive semidefinite matrices.
EXCHANGED_POSITIVE = math.sqrt(2)

BLOCK = 128
_ROUNDING = 2 * BLOCK**2 * 2.0**-24
# Rows are clipped to this share of R: for the rounding of norms, and of sums over blocks.
ROW_SHARE = (1 - CLIP_MARGIN) * (1 - _ROUNDING)

# (units, mask, *parameters) -> a pair.
Statistic = Callable[..., Compensated]


def accumulate(rows: Rows, statistic: Statistic, *parameters: jax.Array) -> Compensated:
  """Sums a statistic over all shards.

  Args:
    rows: the data.
    statistic: (units, mask, *parameters) -> a pair; compiled once for each.
    parameters: arrays that it needs: public, or noised before. They are arguments since a head of
      zeros, closed over, was folded at compile time into weights of zero (jaxlib 0.10.2, CPU, not
      in every compilation).
  """

  total = None
  for units, mask in rows:
    if total is None:
      total = pairs.zeros_like(jax.eval_shape(statistic, units, mask, *parameters).sum)
    total = _add(statistic, total, units, mask, *parameters)
  if total is None:
    raise UserError("there are no shards.")
  return total


@functools.partial(jax.jit, static_argnums=0)
def _add(
  statistic: Statistic, total: Compensated, units: Units, mask: jax.Array, *parameters: jax.Array
) -> Compensated:
  return pairs.add(total, statistic(units, mask, *parameters))


def weighted_rows(units: Units, row_norm: float) -> tuple[jax.Array, jax.Array]:
  """Clipped rows float32[B K, d] of all records, and the weight of each, float32[B K].

  The weight is one over the number of real records of the unit, or zero.
  """
  real = units["record_mask"]
  count = jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)
  weights = jnp.where(real, 1.0 / count, 0.0).astype(jnp.float32).reshape(-1)
  x = units["inputs"].reshape(-1, units["inputs"].shape[-1])
  norms = per_unit_norms(x)
  usable = (weights > 0) & jnp.isfinite(norms)
  most = row_norm * ROW_SHARE
  scales = jnp.where(usable, jnp.minimum(1.0, most / jnp.maximum(norms, 1e-30)), 0.0)
  return scaled(x, scales), weights


@functools.cache
def row_sum(row_norm: float) -> Statistic:
  """Sum over units of the mean of their rows: float32[d]."""

  def statistic(units: Units, mask: jax.Array) -> Compensated:
    rows, weights = weighted_rows(units, row_norm)
    return pairs.sum_units(scaled(rows, weights))

  return statistic


@functools.cache
def second_moment(row_norm: float, *, exact: bool = False) -> Statistic:
  """Sum over units of the mean of x x^T: float32[d, d], of which the upper triangle counts.

  Args:
    row_norm: R.
    exact: for neighbours that lack a unit; see above.
  """

  def statistic(units: Units, mask: jax.Array) -> Compensated:
    rows, weights = weighted_rows(units, row_norm)
    half = scaled(rows, jnp.sqrt(weights))
    return _product(half, half, exact)

  return statistic


@functools.cache
def cross_moment(row_norm: float, num_classes: int, *, exact: bool = False) -> Statistic:
  """Sum over units of the mean of x y^T with one-hot labels: float32[d, C].

  Args:
    row_norm: R.
    num_classes: C.
    exact: for neighbours that lack a unit; see above.
  """

  def statistic(units: Units, mask: jax.Array) -> Compensated:
    rows, weights = weighted_rows(units, row_norm)
    labels = jax.nn.one_hot(units["label"].reshape(-1), num_classes, dtype=jnp.float32)
    return _product(scaled(rows, weights), labels, exact)

  return statistic


@functools.cache
def weighted_moments(
  row_norm: float, weights_of: Callable[..., jax.Array], bound: float, *, exact: bool = False
) -> Statistic:
  """Sum over units of the mean of h_c x x^T for each class c: float32[C, d, d].

  Args:
    row_norm: R.
    weights_of: (float32[n, d] rows, *parameters) -> float32[n, C] weights; below 0 they count as 0.
    bound: on the norm of a row's weights; they are scaled down to it where they exceed it.
    exact: for neighbours that lack a unit; see above.
  """

  def statistic(units: Units, mask: jax.Array, *parameters: jax.Array) -> Compensated:
    rows, record_weights = weighted_rows(units, row_norm)
    weights = jnp.maximum(weights_of(rows, *parameters), 0.0)
    norms = per_unit_norms(weights)
    most = bound * (1 - CLIP_MARGIN)
    shrink = jnp.where(jnp.isfinite(norms), jnp.minimum(1.0, most / jnp.maximum(norms, 1e-30)), 0)
    weights = scaled(weights, shrink * record_weights)
    one = lambda h: _product(scaled(rows, h), rows, exact)  # noqa: E731
    return jax.lax.map(one, weights.T)

  return statistic


def _product(a: jax.Array, b: jax.Array, exact: bool) -> Compensated:
  """a^T b of float32[n, p] and float32[n, q], summed in float64 or in blocks of rows."""
  if exact:
    with pairs.double_precision():
      a, b = a.astype(jnp.float64), b.astype(jnp.float64)
      return pairs.from_float64(jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST))
  count = -(-a.shape[0] // BLOCK)
  pad = [(0, count * BLOCK - a.shape[0]), (0, 0)]
  blocks = [jnp.pad(x, pad).reshape(count, BLOCK, x.shape[1]) for x in (a, b)]

  def step(total: Compensated, block: Any) -> tuple[Compensated, None]:
    part = jnp.matmul(block[0].T, block[1], precision=jax.lax.Precision.HIGHEST)
    return pairs.add(total, Compensated(part, jnp.zeros_like(part))), None

  zero = pairs.zeros_like(jnp.zeros((a.shape[1], b.shape[1])))
  return jax.lax.scan(step, zero, blocks)[0]
