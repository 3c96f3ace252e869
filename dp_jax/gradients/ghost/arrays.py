"""Arrays of a batch of units, as norms and sums take them."""

from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.chunks import weighted_sum
from dp_jax.gradients.ghost.uses import Use

# The sums that make up that of each parameter.
Parts = list[list[Compensated]]


def to_weights(use: Use, weights: list[Any], data: list[Any], cotangents: list[Any]) -> list[Any]:
  """The gradients of a use's parameter operands, of one unit."""
  if canonical.is_convolution(use):
    # By patches: the gradient of a batch of one, under vmap, is a grouped convolution.
    one = canonical.conv_contraction(use, data[0][None], cotangents[0][None])
    gradient = canonical.conv_gradient(use, rules.gradients(one)[0])
    return [gradient.astype(weights[0].dtype)]
  _, pull = jax.vjp(lambda w: use.apply(w, data), weights)
  return pull(cotangents)[0]


def as_pair(total: Compensated) -> Compensated:
  """A sum that may have no error, with one."""
  return pairs.of(total.sum) if total.error is None else total


def added(parts: list[Compensated]) -> Compensated:
  """The sum of the parts of one parameter, at least one; a single one stays as it is."""
  total, *others = parts
  for part in others:
    total = pairs.add(as_pair(total), as_pair(part))
  return total


def clipped(grads: jax.Array, scales: jax.Array, finite: jax.Array, exact: bool) -> Compensated:
  """Of gradients that may hold anything where a scale is zero.

  Both branches are the same sum: were it another one, its rounding would tell of every unit
  whether some other one is finite.
  """
  return jax.lax.cond(
    finite,
    lambda: weighted_sum(grads, scales, exact),
    lambda: weighted_sum(zeroed(grads, scales), scales, exact),
  )


def zeroed(x: jax.Array, scales: jax.Array) -> jax.Array:
  """Zeros for units of scale zero: 0 * NaN is NaN, and these may hold anything."""
  return jnp.where(along(scales != 0, x), x, jnp.zeros((), x.dtype))


def along(values: jax.Array, like: jax.Array) -> jax.Array:
  """[B] -> [B, 1, ...]."""
  return values.reshape(-1, *(1,) * (like.ndim - 1))


def materialised(x: jax.Array) -> jax.Array:
  return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.optimization_barrier(x)
