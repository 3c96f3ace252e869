"""Clipped sums by a loop over units, two of them a turn, each by its own gradient.

Where a unit is much work for each parameter (many tokens), a CPU is fastest this way: what a unit
computes stays in its caches, the units of a turn are independent, so that every core has work, and
the pass over the parameters that each unit costs is small beside its gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.filling import in_blocks
from dp_jax.gradients.engines.norms import quick_norms, scaled
from dp_jax.gradients.engines.styles import ClipRule

PyTree = Any

# Units of a turn. More keep no more cores of a small machine busy, and make a larger program.
UNITS_A_TURN = 2
# Units that are added in plain float32: what n of them round, n^2 2^-24 C, is inside the margin.
_PLAIN_UNITS = 32


def clipped_sum(
  gradient: Callable[..., tuple[jax.Array, PyTree]],
  params: PyTree,
  units: PyTree,
  mask: jax.Array,
  keys: Any,
  rule: ClipRule,
  exact: bool,
) -> tuple[Compensated, jax.Array, jax.Array]:
  """Norms, and the sum of clipped per-unit gradients.

  Args:
    gradient: (params, unit, key) -> loss and gradient of one unit.
    params: the parameters.
    units: leaves [B, ...], B at least 1.
    mask: bool[B].
    keys: a key a unit, or None.
    rule: what each gradient is multiplied with, from its norm.
    exact: add each unit as a pair. Else up to 32 are added in plain float32, one after the other,
      and their sums as pairs: enough where neighbours keep every unit in its place. A unit that is
      taken out moves all later ones to other sums, and in an order that is made for it they would
      all round the same way.

  Returns:
    The sum as a pair, the norms float32[B], and the losses [B].
  """
  size = mask.shape[0]
  width = min(UNITS_A_TURN, size)
  turns = -(-size // width)
  blocks = 1 if exact else -(-turns // (_PLAIN_UNITS // width))
  shape = (blocks, -(-turns // blocks), width)

  xs = in_blocks((units, keys), mask, shape)
  zeros = pairs.zeros_like(params)

  def turn(total: Any, xs: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    some, some_mask = xs
    found = [gradient(params, *_at(i, some)) for i in range(width)]
    kept, norms = _clipped([grad for _, grad in found], some_mask, rule)
    for grad in kept:
      if exact:
        total = pairs.add(total, Compensated(grad, zeros.error))
      else:
        total = jax.tree.map(jnp.add, total, grad)
    return total, (norms, jnp.stack([loss for loss, _ in found]))

  def block(total: Compensated, xs: Any) -> tuple[Compensated, tuple[jax.Array, jax.Array]]:
    part, seen = jax.lax.scan(turn, zeros.sum, xs)
    return pairs.add(total, Compensated(part, zeros.error)), seen

  if exact:
    total, seen = jax.lax.scan(turn, zeros, _at(0, xs))
  elif blocks == 1:
    part, seen = jax.lax.scan(turn, zeros.sum, _at(0, xs))
    total = Compensated(part, zeros.error)
  else:
    total, seen = jax.lax.scan(block, zeros, xs)
  norms, losses = (x.reshape(-1)[:size] for x in seen)
  return total, norms, losses


def _at(index: int, tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x[index], tree)


def _clipped(
  grads: list[PyTree], mask: jax.Array, rule: ClipRule
) -> tuple[list[PyTree], jax.Array]:
  """The scaled gradients of a turn, in float32, and the norms before, float32[len(grads)]."""
  # What is measured is what is added: a compiler may compute it twice, and round differently.
  grads = jax.lax.optimization_barrier(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
  structure = jax.tree.structure(grads[0])
  by_unit = [jax.tree.leaves(grad) for grad in grads]
  norms = jnp.stack([_norms(found, rule) for found in by_unit], axis=1)
  scales = rule.by_leaf(rule.scales(norms, mask))
  kept = [
    [scaled(g[None], s[i : i + 1])[0] for g, s in zip(found, scales, strict=True)]
    for i, found in enumerate(by_unit)
  ]
  return [jax.tree.unflatten(structure, leaves) for leaves in kept], rule.combine(norms)


def _norms(leaves: list[jax.Array], rule: ClipRule) -> jax.Array:
  """float32[G], of each clipping group's part of one unit's gradient."""
  parts: list[list[jax.Array]] = [[] for _ in rule.bounds]
  for group, leaf in zip(rule.group_of, leaves, strict=True):
    parts[group].append(leaf[None])
  return jnp.concatenate([quick_norms(part) for part in parts])
