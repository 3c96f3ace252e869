"""The ghost engine: clipped sum and norms of a batch of units in one backward pass."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.norms import quick_norms, total_norms
from dp_jax.gradients.engines.styles import ClipRule
from dp_jax.gradients.ghost.arrays import as_pair
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.plan import Group
from dp_jax.gradients.ghost.sums import Sums
from dp_jax.gradients.ghost.traced import Traced

PyTree = Any

# How much of a norm may be lost to squares below the range of float32.
_SLACK = 2.0**-20


def clipped_sum(
  traced: Traced,
  params: PyTree,
  units: PyTree,
  mask: jax.Array,
  keys: Any,
  rule: ClipRule,
  memory_budget: int,
  exact: bool = False,
) -> tuple[Compensated, jax.Array, jax.Array]:
  """Norms, and the sum of clipped per-unit gradients.

  Args:
    traced: of the loss.
    params: the parameters.
    units: leaves [B, ...].
    mask: bool[B].
    keys: a key a unit, or None.
    rule: what each gradient is multiplied with, from its norm.
    memory_budget: bytes that instantiated gradients may take together; beyond it they are made
      one unit at a time, twice. Beside them, Gram matrices take as much at most.
    exact: add units in float64, or as pairs, so that it does not matter where one stands.

  Returns:
    The sum as a pair, the upper bounds of the norms float32[B], and the losses [B].
  """
  leaves, structure = jax.tree.flatten(params)
  batch = Batch.run(traced, leaves, units, keys, memory_budget)
  kept, left = kept_groups(traced.groups, mask.shape[0], memory_budget)
  gradients = {index: batch.gradients(traced.groups[index]) for index in kept}
  made = {i: batch.norms_by_unit(g) for i, g in left.items() if g.rule == "instantiate"}
  ghosts = {i: g for i, g in left.items() if i not in made}
  others = made | {i: [quick_norms([g], mask) for g in some] for i, some in gradients.items()}

  def group_norms(by_index: dict[int, list[jax.Array]]) -> jax.Array:
    """float32[G, B] of each clipping group; a parameter that is never used has none."""
    parts = [[jnp.zeros(mask.shape, jnp.float32)] for _ in rule.bounds]
    for index, by_root in by_index.items():
      for root, norm in zip(traced.groups[index].roots, by_root, strict=True):
        parts[rule.group_of[root]].append(norm)
    return jnp.stack([total_norms(jnp.stack(part)) for part in parts])

  fast = {i: batch.fast_norms(g) for i, g in ghosts.items()}
  norms = group_norms(others | {i: [norm + slack] for i, (norm, slack) in fast.items()})
  if ghosts:
    slack = group_norms({i: [slack] for i, (_, slack) in fast.items()})
    precise = ~mask[None] | (slack <= _SLACK * norms)  # false for NaN
    # Numbers so large or small that their squares are not in float32: rare, and slower. Only for
    # such units, so that no unit's norm is rounded in another way because of another unit.
    norms = jax.lax.cond(
      jnp.all(precise),
      lambda: norms,
      lambda: jnp.where(
        precise, norms, group_norms(others | {i: [batch.norms(g)] for i, g in ghosts.items()})
      ),
    )
  scales = rule.by_leaf(rule.scales(norms, mask))
  finite = jnp.all(jnp.isfinite(norms))
  total = Sums(batch, tuple(rule.bounds[g] for g in rule.group_of), exact).of_parameters(
    scales, gradients, made, finite
  )
  return _unflatten(structure, total), rule.combine(norms), batch.losses


def kept_groups(
  groups: Sequence[Group], units: int, memory_budget: int
) -> tuple[list[int], dict[int, Group]]:
  """Groups whose per-unit gradients are made once and kept, and the others."""
  kept, left = [], {}
  for index, group in enumerate(groups):
    size = units * group.numbers * 4
    if (group.rule == "instantiate" or group.how == "gradient") and size <= memory_budget:
      memory_budget -= size
      kept.append(index)
    else:
      left[index] = group
  return kept, left


def _unflatten(structure: Any, totals: list[Compensated]) -> Compensated:
  whole = [as_pair(total) for total in totals]
  return Compensated(
    jax.tree.unflatten(structure, [t.sum for t in whole]),
    jax.tree.unflatten(structure, [t.error for t in whole]),
  )
