"""The clipped sum over a batch of units, once their norms are known."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.arrays import added, clipped, zeroed
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.chunks import part_of_units
from dp_jax.gradients.ghost.plan import Group
from dp_jax.gradients.norms import per_unit_norms, scaled


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums over the units of a batch.

  Attributes:
    batch: after its backward pass.
    exact: sums are float64, or pairs from the first addition, so that it does not matter where a
      unit stands.
  """

  batch: Batch
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
    groups = self.batch.traced.groups
    whole: dict[int, list[Compensated]] = {}
    operands: dict[int, jax.Array] = {}
    for index, group in enumerate(groups):
      some = [scales[root] for root in group.roots]
      if index in kept:
        pairs_of = zip(kept[index], some, strict=True)
        whole[index] = [clipped(g, s, finite, self.exact) for g, s in pairs_of]
      elif index not in made:
        with self._precision():
          operands |= self._operand_sums(group, some[0])
    parts: list[list[Compensated]] = [[] for _ in self.batch.params]
    for index, group in enumerate(groups):
      if index in made:
        pair = self._by_unit(group, [scales[r] for r in group.roots], made[index])
        found = [Compensated(*x) for x in zip(pair.sum, pair.error, strict=True)]
      elif index in kept and group.rule == "instantiate":
        found = whole[index]
      else:
        if index in kept:
          part = whole[index][0]
          with self._precision():
            total = pairs.to_float64(part) if self.exact else pairs.collapse(part)
            operands[group.uses[0]] = self._arranged(group.uses[0], total)
        continue
      for root, pair in zip(group.roots, found, strict=True):
        parts[root].append(pair)
    with self._precision():
      gradients = self._from_operands(operands)
    for root, gradient in gradients.items():
      as_pair = Compensated(gradient, jnp.zeros_like(gradient))
      parts[root].append(pairs.from_float64(gradient) if self.exact else as_pair)
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

  def _precision(self) -> contextlib.AbstractContextManager[Any]:
    return pairs.double_precision() if self.exact else contextlib.nullcontext()

  @property
  def _dtype(self) -> Any:
    return jnp.float64 if self.exact else jnp.float32

  def _from_operands(self, sums: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Sums in the layouts of operands -> by parameter, in its layout."""
    roots = sorted({r for use in sums for r in self.batch.traced.uses[use].weights[0][1].roots})

    def operands(chosen: list[jax.Array]) -> dict[int, jax.Array]:
      params = [p.astype(self._dtype) for p in self.batch.params]
      for root, value in zip(roots, chosen, strict=True):
        params[root] = value
      every = self.batch.traced.rearranged(self.batch.params, params)
      return {use: every[use][0] for use in sums}

    _, pull = jax.vjp(operands, [self.batch.params[r].astype(self._dtype) for r in roots])
    return dict(zip(roots, pull(sums)[0], strict=True))

  def _operand_sums(self, group: Group, scales: jax.Array) -> dict[int, jax.Array]:
    """Clipped sums in the layout of each use's parameter operand."""
    found = {}
    for index in group.uses:
      use = self.batch.traced.uses[index]
      if canonical.is_lookup(use):
        found[index] = rules.lookup_clipped_sum(self.batch.lookup(index), scales, self._dtype)
      elif canonical.is_convolution(use):
        found[index] = self._convolved(index, scales)
      else:
        found[index] = self._contracted(index, scales)
    return found

  def _convolved(self, index: int, scales: jax.Array) -> jax.Array:
    """The sum over units of their scaled gradients, in the layout of the kernel."""
    data, cotangent = self.batch.saved[index][0], self.batch.cotangents[index][0]
    data = zeroed(data, scales).astype(jnp.float32)
    cotangent = scaled(cotangent.astype(jnp.float32), scales)
    return canonical.conv_sum(self.batch.traced.uses[index], data, cotangent, self._dtype)

  def _contracted(self, index: int, scales: jax.Array) -> jax.Array:
    """The same of a product.

    Operands are copied without what is not finite; where they are much larger than the result, a
    part of the units at a time.
    """
    use = self.batch.traced.uses[index]

    def part(data: jax.Array, cotangent: jax.Array, scales: jax.Array) -> jax.Array:
      data = zeroed(data, scales)
      cotangent = scaled(cotangent.astype(jnp.float32), scales)
      return rules.summed(canonical.dot_contraction(use, data, cotangent), self._dtype)

    arrays = (self.batch.saved[index][0], self.batch.cotangents[index][0], scales)
    made = jax.eval_shape(part, *arrays)
    size = part_of_units(len(scales), 4 * (arrays[0].size + arrays[1].size), 4 * made.size)

    if size == len(scales):
      return canonical.dot_gradient(use, part(*arrays))

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
      some = (jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in arrays)
      return total + part(*some)

    # A loop: of parts in a row, XLA may make all copies at once.
    zero = jnp.zeros(made.shape, made.dtype)
    total = jax.lax.fori_loop(0, len(scales) // size, body, zero)
    return canonical.dot_gradient(use, total)

  def _arranged(self, index: int, total: jax.Array) -> jax.Array:
    """float32[N, K, O] -> the layout of the use's parameter operand."""
    use = self.batch.traced.uses[index]
    if canonical.is_convolution(use):
      return canonical.conv_gradient(use, total)
    return canonical.dot_gradient(use, total)
