"""The clipped sum of one kind of product over the units of a batch, in few units at a time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.norms import scaled
from dp_jax.gradients.ghost import canonical, rounding, rules
from dp_jax.gradients.ghost.arrays import zeroed
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.chunks import (
  in_chunks,
  part_of_units,
  patch_bytes,
  sum_in_parts,
  units_at_a_time,
)
from dp_jax.gradients.ghost.plan import Group


@dataclasses.dataclass(frozen=True)
class Products:
  """Products alike of one parameter, or its convolution.

  Attributes:
    batch: after its backward pass.
    uses: their indices.
    nets: 2 where this is one of several sums of the parameter, else 1.
  """

  batch: Batch
  uses: tuple[int, ...]
  nets: int

  @classmethod
  def of_group(cls, batch: Batch, group: Group) -> "Products | None":
    """Those of a group, or None if it only looks up."""
    found = tuple(i for i in group.uses if not canonical.is_lookup(batch.traced.uses[i]))
    return cls(batch, found, 1 + (len(found) < len(group.uses))) if found else None

  def total(self, scales: jax.Array, exact: bool, singly: bool = False) -> Compensated:
    """The sum over units of their scaled gradients, float32[N, K, O]; without an error if plain.

    Args:
      scales: float32[B].
      exact: in float64.
      singly: one unit after the other, for those that `alone` found.
    """
    if exact:
      with pairs.double_precision():
        return pairs.from_float64(sum_in_parts(
          lambda *args: rules.summed(self._contraction(*args), jnp.float64),
          self._arrays, scales, self._at_once, jnp.add,
        ))  # fmt: skip
    units, most = len(scales), self._units_at_a_time
    at_once = min(self._at_once, rounding.TREE * most)
    if at_once >= units and not singly:
      return Compensated(self._tree(most, self._arrays, scales), None)
    if at_once >= units and units <= rounding.ALONE and self.nets == 1:
      function = functools.partial(self._tree, 1)
      return Compensated(sum_in_parts(function, self._arrays, scales, 1, jnp.add), None)
    return sum_in_parts(
      lambda *args: pairs.of(self._tree(most, *args)),
      self._arrays, scales, 1 if singly else at_once, pairs.add,
    )  # fmt: skip

  def alone(self, scales: jax.Array, bound: float) -> jax.Array | None:
    """bool[B], which units must not be added together with others; None if all may."""
    _, terms, inputs, outputs = self._sizes
    if len(scales) == 1 or (self.nets == 1 and (terms == 1 or self._units_at_a_time == 1)):
      return None
    cheap = rules.gram_is_cheaper(1, terms, inputs, outputs)

    def longest(data: Any, cotangents: Any) -> jax.Array:
      c = self._as_one(data, cotangents)
      return rules.longest_parts(c) if cheap else rules.magnitudes(c)

    size = self._patch_bytes or 8 * terms * terms
    found = in_chunks(
      longest, self._arrays, size, self.batch.memory_budget, patches=self._patch_bytes > 0
    )  # fmt: skip
    return rounding.unusual(jnp.where(scales != 0, found, 0.0) * scales, bound)

  def arranged(self, total: Compensated) -> Compensated:
    """float32[N, K, O] -> the layout of the parameter operand of the first use."""
    use = self.batch.traced.uses[self.uses[0]]
    convolution = canonical.is_convolution(use)
    layout = canonical.conv_gradient if convolution else canonical.dot_gradient
    return jax.tree.map(functools.partial(layout, use), total)

  def _tree(self, most: int, some: Any, scales: jax.Array) -> jax.Array:
    """The sum of at most TREE products of few units each."""
    c = self._contraction(some, scales)
    units = len(scales)
    size = -(-units // -(-units // most))
    parts = [
      rules.summed(rules.Contraction(c.operand[i : i + size], c.cotangent[i : i + size]))
      for i in range(0, units, size)
    ]
    while len(parts) > 1:
      parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]

  def _contraction(self, some: Any, scales: jax.Array) -> rules.Contraction:
    """Of scaled gradients; operands are copied without what is not finite."""
    data, cotangents = some
    kept = [zeroed(x, scales) for x in data]
    return self._as_one(kept, [scaled(x.astype(jnp.float32), scales) for x in cotangents])

  def _as_one(self, data: list[jax.Array], cotangents: list[jax.Array]) -> rules.Contraction:
    pairs_of = zip(self.uses, data, cotangents, strict=True)
    parts = [self._as_contraction(*each) for each in pairs_of]
    return parts[0] if len(parts) == 1 else rules.concatenate(parts)

  def _as_contraction(self, index: int, data: jax.Array, cotangent: jax.Array) -> Any:
    use = self.batch.traced.uses[index]
    if canonical.is_convolution(use):
      return canonical.conv_contraction(use, data, cotangent)
    return canonical.dot_contraction(use, data, cotangent)

  @property
  def _arrays(self) -> tuple[list[jax.Array], list[jax.Array]]:
    saved, cotangents = self.batch.saved, self.batch.cotangents
    return [saved[i][0] for i in self.uses], [cotangents[i][0] for i in self.uses]

  @functools.cached_property
  def _sizes(self) -> tuple[int, int, int, int]:
    """(N, terms, K, O)."""
    one = jax.tree.map(lambda x: x[:1], self._arrays)
    x, cot = jax.eval_shape(
      lambda some: dataclasses.astuple(self._contraction(some, jnp.ones(1, jnp.float32))), one
    )
    return *x.shape[1:], cot.shape[3]

  @property
  def _at_once(self) -> int:
    """Units whose copied operands are small enough."""
    blocks, _, inputs, outputs = self._sizes
    copied = 4 * sum(x.size for x in jax.tree.leaves(self._arrays))
    units = len(self.batch.losses)
    at_once = part_of_units(units, copied, 4 * blocks * inputs * outputs)
    if not self._patch_bytes:
      return at_once
    budget = self.batch.memory_budget
    return min(at_once, units_at_a_time(self._patch_bytes, budget, patches=True))

  @property
  def _units_at_a_time(self) -> int:
    blocks, terms, inputs, outputs = self._sizes
    if self.nets == 1 and not rules.gram_is_cheaper(blocks, terms, inputs, outputs):
      return 1 if terms > 1 else rounding.units_at_a_time(terms)
    return rounding.units_at_a_time(terms, self.nets)

  @property
  def _patch_bytes(self) -> int:
    """Bytes of the patches of one unit; 0 for products."""
    use = self.batch.traced.uses[self.uses[0]]
    return patch_bytes(use) if canonical.is_convolution(use) else 0
