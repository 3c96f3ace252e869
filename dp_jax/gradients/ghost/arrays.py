"""Arrays of a batch of units, as norms and sums take them."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.chunks import weighted_sum
from dp_jax.gradients.ghost.uses import Use

if TYPE_CHECKING:
  from dp_jax.gradients.ghost.batch import Batch

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


def rearranged(batch: "Batch", sums: dict[int, Compensated]) -> list[tuple[int, Compensated]]:
  """Sums in the layouts of the operands of uses -> (parameter, its sum in its own layout).

  Uses of different slices of a parameter are put together; of the same, each is a sum of its own,
  since adding two sums over many units rounds as much as all of these.
  """
  layers: list[dict[int, Compensated]] = []
  seen: dict[tuple[int, int | None], int] = {}
  for index, pair in sums.items():
    origin = batch.traced.uses[index].weights[0][1]
    (root,) = origin.roots
    layer = seen.get((root, origin.index), 0)
    seen[root, origin.index] = layer + 1
    if layer == len(layers):
      layers.append({})
    layers[layer][index] = pair
  return [found for layer in layers for found in _one_layer(batch, layer)]


def _one_layer(batch: "Batch", sums: dict[int, Compensated]) -> list[tuple[int, Compensated]]:
  roots = sorted({r for use in sums for r in batch.traced.uses[use].weights[0][1].roots})

  def operands(chosen: list[jax.Array]) -> dict[int, jax.Array]:
    params = [p.astype(jnp.float32) for p in batch.params]
    for root, value in zip(roots, chosen, strict=True):
      params[root] = value
    every = batch.traced.rearranged(batch.params, params)
    return {use: every[use][0] for use in sums}

  _, pull = jax.vjp(operands, [batch.params[r].astype(jnp.float32) for r in roots])
  (total,) = pull({use: pair.sum for use, pair in sums.items()})
  if all(pair.error is None for pair in sums.values()):
    return [(root, Compensated(x, None)) for root, x in zip(roots, total, strict=True)]
  (error,) = pull({use: as_pair(pair).error for use, pair in sums.items()})
  return [(root, Compensated(*pair)) for root, *pair in zip(roots, total, error, strict=True)]


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
