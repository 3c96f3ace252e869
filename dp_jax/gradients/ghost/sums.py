"""The clipped sum over a batch of units, once their norms are known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, lookups, rounding, rules
from dp_jax.gradients.ghost.arrays import added, clipped, rearranged, zeroed
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.chunks import (
  in_chunks,
  part_of_patches,
  part_of_units,
  patch_bytes,
  sum_in_parts,
)
from dp_jax.gradients.ghost.plan import Group
from dp_jax.gradients.norms import per_unit_norms, scaled


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums over the units of a batch.

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
    parts: list[list[Compensated]] = [[] for _ in self.batch.params]
    operands: dict[int, Compensated] = {}
    for index, group in enumerate(self.batch.traced.groups):
      some = [scales[root] for root in group.roots]
      if index in made:
        pair = self._by_unit(group, some, made[index])
        found = [Compensated(*x) for x in zip(pair.sum, pair.error, strict=True)]
      elif index in kept:
        pairs_of = zip(kept[index], some, strict=True)
        found = [clipped(g, s, finite, self.exact) for g, s in pairs_of]
        if group.rule != "instantiate":
          operands[group.uses[0]] = self._arranged(group.uses[0], found[0])
          continue
      else:
        operands |= self._operand_sums(group, some[0], self.bounds[group.roots[0]])
        continue
      for root, pair in zip(group.roots, found, strict=True):
        parts[root].append(pair)
    for root, pair in rearranged(self.batch, operands):
      parts[root].append(pair)
    return [added(some, p) for some, p in zip(parts, self.batch.params, strict=True)]

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
      return pairs.add(total, Compensated(grads, jax.tree.map(jnp.zeros_like, grads))), None

    zero = pairs.zeros_like([self.batch.params[r] for r in group.roots])
    return jax.lax.scan(body, zero, (scales, norms, *self.batch.inputs(group)))[0]

  def _operand_sums(self, group: Group, scales: jax.Array, bound: float) -> dict[int, Compensated]:
    """Clipped sums in the layout of a use's parameter operand, by use."""
    found: dict[int, Compensated] = {}
    products = []
    for index in group.uses:
      if canonical.is_lookup(self.batch.traced.uses[index]):
        found[index] = lookups.clipped_sum(self.batch.lookup(index), scales, bound)
      else:
        products.append(index)
    if products:
      total = self._contracted(products, scales, bound)
      found[products[0]] = self._arranged(products[0], total)
    return found

  def _contracted(self, uses: list[int], scales: jax.Array, bound: float) -> Compensated:
    """The sum over units of the scaled gradients of products alike, or of a convolution.

    Returns:
      Leaves float32[N, K, O], as of a contraction.
    """
    arrays = ([self.batch.saved[i][0] for i in uses], [self.batch.cotangents[i][0] for i in uses])

    def contraction(some: Any, scales: jax.Array) -> rules.Contraction:
      parts = [
        # Copied without what is not finite.
        self._as_contraction(i, zeroed(x, scales), scaled(cot.astype(jnp.float32), scales))
        for i, x, cot in zip(uses, *some, strict=True)
      ]
      return parts[0] if len(parts) == 1 else rules.concatenate(parts)

    x, cot = jax.eval_shape(
      lambda *args: dataclasses.astuple(contraction(*args)), arrays, scales
    )  # fmt: skip
    _, blocks, terms, inputs = x.shape
    patches = self._patch_bytes(uses)
    copied = 4 * sum(each.size for each in jax.tree.leaves(arrays))
    at_once = part_of_units(len(scales), copied, 4 * blocks * inputs * cot.shape[3])
    at_once = min(at_once, part_of_patches(patches)) if patches else at_once
    if self.exact:
      with pairs.double_precision():
        return pairs.from_float64(sum_in_parts(
          lambda *args: rules.summed(contraction(*args), jnp.float64),
          arrays, scales, at_once, lambda a, b: a + b,
        ))  # fmt: skip

    def in_parts(most: int) -> Compensated:
      return sum_in_parts(
        lambda *args: pairs.of(rules.summed(contraction(*args))),
        arrays, scales, min(at_once, most), pairs.add,
      )  # fmt: skip

    most = rounding.units_at_a_time(terms)
    if terms == 1 or most == 1 or len(scales) == 1:
      return in_parts(most)
    magnitudes = in_chunks(
      lambda *args: rules.magnitudes(contraction(*args)), (arrays, scales),
      patches or 4 * blocks * terms * inputs, patches=patches > 0,
    )  # fmt: skip
    usual = rounding.usual(magnitudes, bound, terms)
    return jax.lax.cond(usual, lambda: in_parts(most), lambda: in_parts(1))

  def _as_contraction(self, index: int, data: jax.Array, cotangent: jax.Array) -> Any:
    use = self.batch.traced.uses[index]
    if canonical.is_convolution(use):
      return canonical.conv_contraction(use, data, cotangent)
    return canonical.dot_contraction(use, data, cotangent)

  def _patch_bytes(self, uses: list[int]) -> int:
    """Bytes of the patches of one unit; 0 for products."""
    use = self.batch.traced.uses[uses[0]]
    return patch_bytes(use) if canonical.is_convolution(use) else 0

  def _arranged(self, index: int, total: Compensated) -> Compensated:
    """Leaves float32[N, K, O] -> the layout of the use's parameter operand."""
    use = self.batch.traced.uses[index]
    if canonical.is_convolution(use):
      return Compensated(*(canonical.conv_gradient(use, x) for x in total))
    return Compensated(*(canonical.dot_gradient(use, x) for x in total))


def _add_float64(a: jax.Array, b: jax.Array) -> jax.Array:
  return a + b
