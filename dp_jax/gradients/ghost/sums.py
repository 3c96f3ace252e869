"""The clipped sum over a batch of units, once their norms are known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.norms import per_unit_norms, scaled
from dp_jax.gradients.ghost import canonical, lookups, rounding
from dp_jax.gradients.ghost.arrays import Parts, added, as_pair, clipped
from dp_jax.gradients.ghost.batch import Batch, rearranged
from dp_jax.gradients.ghost.plan import Group
from dp_jax.gradients.ghost.products import Products


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
    for root, pair in rearranged(self.batch, operands):
      parts[root].append(pair)
    for root, pair in self._of_ghosts(ghosts, scales).items():
      parts[root].append(pair)
    # A parameter that is never used has no part.
    return [
      added(some) if some else Compensated(jnp.zeros(p.shape, jnp.float32), None)
      for some, p in zip(parts, self.batch.params, strict=True)
    ]

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

  def _of_ghosts(self, groups: list[Group], scales: list[jax.Array]) -> dict[int, Compensated]:
    """Sums of groups that are never made whole, by parameter."""

    def total(singly: bool) -> dict[int, Compensated]:
      found = self._of_operands(groups, scales, singly)
      return found if self._is_small else {root: as_pair(x) for root, x in found.items()}

    alone = self._alone(groups, scales)
    if alone is None:
      return self._of_operands(groups, scales, False)
    # As a rule, no unit must be.
    return jax.lax.cond(jnp.any(alone), lambda: total(True), lambda: total(False))

  def _of_operands(
    self, groups: list[Group], scales: list[jax.Array], singly: bool
  ) -> dict[int, Compensated]:
    operands: dict[int, Compensated] = {}
    plain = self._is_small and not self.exact
    for group in groups:
      (root,) = group.roots
      products = Products.of_group(self.batch, group)
      for index in group.uses:
        if canonical.is_lookup(self.batch.traced.uses[index]):
          operands[index] = lookups.clipped_sum(
            self.batch.lookup(index), scales[root], self.bounds[root],
            nets=1 if products is None else products.nets, plain=plain and products is None,
          )  # fmt: skip
      if products is not None:
        total = products.total(scales[root], self.exact, singly)
        operands[products.uses[0]] = products.arranged(total)
    parts: dict[int, list[Compensated]] = {}
    for root, pair in rearranged(self.batch, operands):
      parts.setdefault(root, []).append(pair)
    return {root: added(some) for root, some in parts.items()}

  def _alone(self, groups: Sequence[Group], scales: list[jax.Array]) -> jax.Array | None:
    """bool[B], which units must not be added together with others; None if all may."""
    found: list[jax.Array] = []
    for group in [] if self.exact else groups:
      products = Products.of_group(self.batch, group)
      (root,) = group.roots
      some = None if products is None else products.alone(scales[root], self.bounds[root])
      found += [] if some is None else [some]
    return jnp.any(jnp.stack(found), axis=0) if found else None

  @property
  def _is_small(self) -> bool:
    """Whether the batch has so few units that their sums may be added without pairs."""
    return len(self.batch.losses) <= rounding.ALONE
