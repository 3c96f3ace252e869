"""The clipped sum over a batch of units, once their norms are known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, lookups, rounding
from dp_jax.gradients.ghost.arrays import Parts, added, clipped, rearranged
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.plan import Group
from dp_jax.gradients.ghost.products import Products
from dp_jax.gradients.norms import per_unit_norms, scaled


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums over the units of a batch.

  A sum that float32 adds well enough without pairs has no error: `Compensated(sum, None)`.

  Attributes:
    batch: after its backward pass.
    bounds: the clip norm of each parameter: what a unit's scaled gradient of it is at most.
    exact: sums are float64, or pairs from the first addition, so that it does not matter where a
      unit stands.
  """

  batch: Batch
  bounds: tuple[float, ...]
  exact: bool

  def of_parameters(
    self,
    scales: list[jax.Array],
    kept: dict[int, list[jax.Array]],
    made: dict[int, list[jax.Array]],
    finite: jax.Array,
  ) -> list[Compensated]:
    """The clipped sum of every parameter.

    Args:
      scales: float32[B] of each parameter.
      kept: gradients of the groups that were made and kept.
      made: norms of the groups that were made and dropped.
      finite: bool[], whether all norms are, so that no operand holds what 0 does not make 0.
    """
    parts: Parts = [[] for _ in self.batch.params]
    operands: dict[int, Compensated] = {}
    ghosts: list[Group] = []
    for index, group in enumerate(self.batch.traced.groups):
      some = [scales[root] for root in group.roots]
      if index in made:
        pair = self._by_unit(group, some, made[index])
        found = [Compensated(*x) for x in zip(pair.sum, pair.error, strict=True)]
      elif index in kept:
        pairs_of = zip(kept[index], some, strict=True)
        found = [clipped(g, s, finite, self.exact) for g, s in pairs_of]
      else:
        ghosts.append(group)
        continue
      if group.rule == "instantiate":
        for root, pair in zip(group.roots, found, strict=True):
          parts[root].append(pair)
      else:
        operands[group.uses[0]] = self._arranged(group, found[0])
    alone = self._alone(ghosts, scales)
    together = scales if alone is None else [jnp.where(alone, 0.0, each) for each in scales]
    self._add_ghosts(ghosts, together, operands, parts)
    total = [added(some, p) for some, p in zip(parts, self.batch.params, strict=True)]
    return total if alone is None else self._with_alone(ghosts, alone, scales, total)

  def _by_unit(self, group: Group, scales: list[jax.Array], norms: list[jax.Array]) -> Compensated:
    """Their clipped sum, made one unit at a time."""
    pull = self.batch.pullback(group)

    def body(total: Compensated, inputs: Any) -> tuple[Compensated, None]:
      some, expected, *rest = inputs
      grads = []
      for g, scale, norm in zip(pull(*rest), some, expected, strict=True):
        # Made anew, it may be rounded differently, and tokens that cancel leave rounding alone.
        again = per_unit_norms([g[None]])
        scale = jnp.where(again > norm, scale * (norm / again), scale)
        grads.append(scaled(g[None], scale)[0])
      return pairs.add(total, pairs.of(grads)), None

    zero = pairs.zeros_like([self.batch.params[r] for r in group.roots])
    return jax.lax.scan(body, zero, (scales, norms, *self.batch.inputs(group)))[0]

  def _arranged(self, group: Group, total: Compensated) -> Compensated:
    products = Products.of_group(self.batch, group)
    assert products is not None  # what is looked up is not kept
    return products.arranged(total)

  def _add_ghosts(
    self,
    groups: Sequence[Group],
    scales: list[jax.Array],
    operands: dict[int, Compensated],
    parts: Parts,
  ) -> None:
    """Adds to `parts` the sums of groups never made whole, and those in layouts of operands."""
    for group in groups:
      (root,) = group.roots
      for index in group.uses:
        if canonical.is_lookup(self.batch.traced.uses[index]):
          looked_up = self.batch.lookup(index)
          operands[index] = lookups.clipped_sum(looked_up, scales[root], self.bounds[root])
      products = Products.of_group(self.batch, group)
      if products is not None:
        total = products.total(scales[root], self.exact)
        operands[products.uses[0]] = products.arranged(total)
    for root, pair in rearranged(self.batch, operands):
      parts[root].append(pair)

  def _alone(self, groups: Sequence[Group], scales: list[jax.Array]) -> jax.Array | None:
    """bool[B], which units must not be added together with others; None if all may."""
    found: list[jax.Array] = []
    for group in [] if self.exact else groups:
      products = Products.of_group(self.batch, group)
      (root,) = group.roots
      some = None if products is None else products.alone(scales[root], self.bounds[root])
      found += [] if some is None else [some]
    return jnp.any(jnp.stack(found), axis=0) if found else None

  def _with_alone(
    self,
    groups: Sequence[Group],
    alone: jax.Array,
    scales: list[jax.Array],
    total: list[Compensated],
  ) -> list[Compensated]:
    """Adds the units that were left out, one at a time. There are none, as a rule."""
    roots = sorted({root for group in groups for root in group.roots})
    uses = sorted({use for group in groups for use in group.uses})
    plain = len(alone) <= rounding.ALONE
    order = jnp.argsort(~alone)

    def body(i: jax.Array, some: list[Compensated]) -> list[Compensated]:
      def one(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, order[i], 1)

      saved, cotangents = list(self.batch.saved), list(self.batch.cotangents)
      for use in uses:
        saved[use], cotangents[use] = jax.tree.map(one, (saved[use], cotangents[use]))
      batch = dataclasses.replace(self.batch, saved=saved, cotangents=cotangents)
      parts: Parts = [[] for _ in self.batch.params]
      sums = dataclasses.replace(self, batch=batch)
      sums._add_ghosts(groups, [one(each) for each in scales], {}, parts)
      pairs_of = zip(some, (added(parts[r], self.batch.params[r]) for r in roots), strict=True)
      return [
        Compensated(a.sum + b.sum, None) if a.error is None else pairs.add(a, _as_pair(b))
        for a, b in pairs_of
      ]

    before = [total[root] if plain else _as_pair(total[root]) for root in roots]
    after = jax.lax.fori_loop(0, jnp.sum(alone), body, before)
    total = list(total)
    for root, pair in zip(roots, after, strict=True):
      total[root] = pair
    return total


def _as_pair(pair: Compensated) -> Compensated:
  return pairs.of(pair.sum) if pair.error is None else pair
