"""Clipped sums by a loop over units, two of them a turn, each by its own gradient.

Where a unit is much work for each parameter (many tokens), a CPU is fastest this way: what a unit
computes stays in its caches, the units of a turn are independent, so that every core has work, and
the pass over the parameters that each unit costs is small beside its gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.norms import quick_norms, scaled
from dp_jax.gradients.styles import ClipRule

PyTree = Any

# Units of a turn. More keep no more cores of a small machine busy, and make a larger program.
UNITS_A_TURN = 2
# Units that are added in plain float32: what n of them round, n^2 2^-24 C, is inside the margin.
_MOST_PLAIN, _FEWEST_PLAIN = 32, 2


def plain_units_of(microbatch_size: int | None) -> int:
  """How many units to add in plain float32, one after the other.

  Over a step of S units in blocks of n, each rounded anew where a unit is removed, the roundings
  add up to about 2^-24 n sqrt(S) C / 4 (one standard deviation). A product of m units has
  2^-25 sqrt(S m) C / 3, so the square root of the m that serves products serves here.

  Args:
    microbatch_size: of `clipped_grad`, at most `plain_units_under_removal` where units may be
      removed; None where every unit has its place.
  """
  if microbatch_size is None:
    return _MOST_PLAIN
  return min(_MOST_PLAIN, max(_FEWEST_PLAIN, 2 ** int(math.log2(math.sqrt(microbatch_size)))))


def clipped_sum(
  loss_fn: Callable[..., jax.Array],
  params: PyTree,
  units: PyTree,
  mask: jax.Array,
  keys: Any,
  rule: ClipRule,
  plain_units: int,
) -> tuple[Compensated, jax.Array, jax.Array]:
  """Norms, and the sum of clipped per-unit gradients.

  Args:
    loss_fn: (params, unit, key) -> scalar.
    params: the parameters.
    units: leaves [B, ...], B at least 1.
    mask: bool[B].
    keys: a key a unit, or None.
    rule: what each gradient is multiplied with, from its norm.
    plain_units: the most units that are added in plain float32, one after the other; the sums of
      so many are added as pairs.

  Returns:
    The sum as a pair, the norms float32[B], and the losses [B].
  """
  size = mask.shape[0]
  width = min(UNITS_A_TURN, size)
  turns = -(-size // width)
  blocks = -(-turns // max(1, plain_units // width))
  shape = (blocks, -(-turns // blocks), width)

  def arranged(x: jax.Array) -> jax.Array:
    # The filler repeats the last unit, so that it is a valid input; the mask makes it zero.
    filled = x[jnp.minimum(jnp.arange(math.prod(shape)), size - 1)]
    return filled.reshape(*shape, *x.shape[1:])

  masks = jnp.pad(mask, (0, math.prod(shape) - size)).reshape(shape)
  xs = (jax.tree.map(arranged, units), masks, jax.tree.map(arranged, keys))
  zeros = pairs.zeros_like(params)

  def turn(total: PyTree, xs: Any) -> tuple[PyTree, tuple[jax.Array, jax.Array]]:
    some_units, some_mask, some_keys = xs
    found = [
      jax.value_and_grad(loss_fn)(params, *_at(i, (some_units, some_keys))) for i in range(width)
    ]
    total, norms = _add_clipped(total, [grad for _, grad in found], some_mask, rule)
    return total, (norms, jnp.stack([loss for loss, _ in found]))

  def block(total: Compensated, xs: Any) -> tuple[Compensated, tuple[jax.Array, jax.Array]]:
    part, seen = jax.lax.scan(turn, zeros.sum, xs)
    return pairs.add(total, Compensated(part, zeros.error)), seen

  if blocks == 1:
    part, seen = jax.lax.scan(turn, zeros.sum, _at(0, xs))
    total = Compensated(part, zeros.error)
  else:
    total, seen = jax.lax.scan(block, zeros, xs)
  norms, losses = (x.reshape(-1)[:size] for x in seen)
  return total, norms, losses


def _at(index: int, tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x[index], tree)


def _add_clipped(
  total: PyTree, grads: list[PyTree], mask: jax.Array, rule: ClipRule
) -> tuple[PyTree, jax.Array]:
  """Adds the scaled gradients of a turn, in plain float32; their norms are float32[len(grads)]."""
  grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
  leaves, structure = jax.tree.flatten(total)
  by_unit = [jax.tree.leaves(grad) for grad in grads]
  norms = jnp.stack([_norms(found, rule) for found in by_unit], axis=1)
  scales = rule.by_leaf(rule.scales(norms, mask))
  for i, found in enumerate(by_unit):
    kept = [scaled(g[None], s[i : i + 1])[0] for g, s in zip(found, scales, strict=True)]
    leaves = [t + g for t, g in zip(leaves, kept, strict=True)]
  return jax.tree.unflatten(structure, leaves), rule.combine(norms)


def _norms(leaves: list[jax.Array], rule: ClipRule) -> jax.Array:
  """float32[G], of each clipping group's part of one unit's gradient."""
  parts: list[list[jax.Array]] = [[] for _ in rule.bounds]
  for group, leaf in zip(rule.group_of, leaves, strict=True):
    parts[group].append(leaf[None])
  return jnp.concatenate([quick_norms(part) for part in parts])
