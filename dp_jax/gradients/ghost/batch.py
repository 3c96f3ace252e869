"""A batch of units after its backward pass: norms and clipped sums of each group of the plan."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.arrays import added, clipped, materialised, to_weights, zeroed
from dp_jax.gradients.ghost.chunks import in_chunks, part_of_units, patch_bytes
from dp_jax.gradients.ghost.plan import Group, by_pixels
from dp_jax.gradients.ghost.uses import Use
from dp_jax.gradients.norms import per_unit_norms, scaled

if TYPE_CHECKING:
  from dp_jax.gradients.ghost.engine import Traced

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Batch:
  """Cotangents and saved operands of every use.

  Attributes:
    exact: sums over units are float64, or pairs from the first addition, so that it does not matter
      where a unit stands.
  """

  traced: "Traced"
  params: list[jax.Array]
  weights: list[list[Any]]
  losses: jax.Array
  cotangents: list[list[jax.Array]]
  saved: list[list[jax.Array]]
  exact: bool = False

  @classmethod
  def run(
    cls, traced: "Traced", params: list[jax.Array], units: PyTree, keys: Any, exact: bool = False
  ) -> "Batch":
    """The backward pass.

    Args:
      traced: of the loss.
      params: the parameters' leaves.
      units: leaves [B, ...].
      keys: a key a unit, or None.
      exact: of the sums.
    """
    data = jax.tree.leaves((units, keys))
    taps = [
      [jnp.zeros(u.eqn.outvars[i].aval.shape, u.eqn.outvars[i].aval.dtype) for i in u.outputs]
      for u in traced.uses
    ]

    def loss(taps: Any, data: list[Any]) -> Any:
      return traced.loss(params, taps, data)

    backward = jax.vmap(jax.value_and_grad(loss, has_aux=True), in_axes=(None, 0))
    (losses, saved), cotangents = backward(taps, data)
    # Norms and sums must see the same numbers: without it, a compiler may compute them twice, and
    # round differently.
    saved, cotangents = jax.tree.map(materialised, (saved, cotangents))
    return cls(traced, params, traced.weights(params), losses, cotangents, saved, exact)

  def fast_norms(self, group: Group) -> tuple[jax.Array, jax.Array]:
    """As `norms`, of operands that are not scaled; and what squares that vanish may hide."""
    if group.rule == "lookup":
      return rules.fast_lookup_norms(self._lookup(group.uses[0]))
    if group.rule == "tied":
      lookup, product = self._tied(group)
      return rules.fast_tied_norms(self._lookup(lookup), self._contraction(product))
    use = self.traced.uses[group.uses[0]]
    if canonical.is_convolution(use):
      return self._convolution_norms(use, group, rules.fast_norms)
    return self._product_norms(group, rules.fast_norms)

  def norms(self, group: Group) -> jax.Array:
    """Upper bounds of the norms, float32[B], of a group that is not instantiated.

    One unit at a time, so that the scaled copies of operands stay small.
    """

    def one(unit: tuple[Any, Any]) -> jax.Array:
      saved, cotangents = list(self.saved), list(self.cotangents)
      for i, data, cotangent in zip(
        group.uses, *jax.tree.map(lambda x: x[None], unit), strict=True
      ):
        saved[i], cotangents[i] = data, cotangent
      alone = dataclasses.replace(self, saved=saved, cotangents=cotangents)
      return alone._scaled_norms(group)[0]

    return jax.lax.map(one, self._inputs(group))

  def _scaled_norms(self, group: Group) -> jax.Array:
    if group.rule == "lookup":
      return rules.lookup_norms(self._lookup(group.uses[0]))
    if group.rule == "tied":
      lookup, product = self._tied(group)
      return rules.tied_norms(self._lookup(lookup), self._contraction(product))
    use = self.traced.uses[group.uses[0]]
    if canonical.is_convolution(use):
      return self._convolution_norms(use, group, rules.norms)
    return self._product_norms(group, rules.norms)

  def _product_norms(self, group: Group, norms: Callable[[Any], Any]) -> Any:
    contractions = [self._contraction(u) for u in group.uses]
    one = contractions[0] if len(contractions) == 1 else rules.concatenate(contractions)
    return in_chunks(
      lambda x, cot: norms(rules.Contraction(x, cot)),
      (one.operand, one.cotangent), 4 * group.numbers, patches=False,
    )  # fmt: skip

  def _convolution_norms(self, use: Use, group: Group, norms: Callable[[Any], Any]) -> Any:
    pixels = group.how == "gram" and by_pixels(use) and norms is rules.fast_norms

    def some(data: jax.Array, cotangent: jax.Array) -> Any:
      if pixels:
        found = rules.fast_norms_of_grams(
          *canonical.conv_grams(use, data), canonical.conv_sizes(use)[2],
          canonical.conv_cotangent(use, cotangent),
        )  # fmt: skip
      else:
        found = norms(canonical.conv_contraction(use, data, cotangent))
      if not canonical.skips_pixels(use):
        return found
      # The sum multiplies such pixels with zero.
      finite = jnp.all(jnp.isfinite(data), axis=tuple(range(1, data.ndim)))
      return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), found)

    index = group.uses[0]
    size = 8 * canonical.conv_pixels(use) ** 2 if pixels else patch_bytes(use)
    arrays = (self.saved[index][0], self.cotangents[index][0])
    return in_chunks(some, arrays, size, patches=True)

  def gradients(self, group: Group) -> list[jax.Array]:
    """Per-unit gradients float32[B, ...]: of the parameters, or of a contraction [B, N, K, O]."""
    uses = [self.traced.uses[i] for i in group.uses]
    size = max((patch_bytes(use) for use in uses if canonical.is_convolution(use)), default=0)
    if group.rule == "instantiate":
      pull = self._pullback(group)
      return in_chunks(jax.vmap(pull), self._inputs(group), size, patches=True)
    if group.rule == "convolution":

      def some(data: jax.Array, cotangent: jax.Array) -> jax.Array:
        return rules.gradients(canonical.conv_contraction(uses[0], data, cotangent))

      index = group.uses[0]
      arrays = (self.saved[index][0], self.cotangents[index][0])
      return [in_chunks(some, arrays, size, patches=True)]
    contractions = [self._contraction(u) for u in group.uses]
    one = contractions[0] if len(contractions) == 1 else rules.concatenate(contractions)
    return [rules.gradients(one)]

  def norms_by_unit(self, group: Group) -> list[jax.Array]:
    """Norms of instantiated gradients, made and dropped one unit at a time."""
    pull = self._pullback(group)

    def one(inputs: Any) -> list[jax.Array]:
      return [per_unit_norms([g[None]])[0] for g in pull(*inputs)]

    return jax.lax.map(one, self._inputs(group))

  def sum_by_unit(
    self, group: Group, scales: list[jax.Array], norms: list[jax.Array]
  ) -> Compensated:
    """Their clipped sum, made one unit at a time."""
    pull = self._pullback(group)

    def body(total: Compensated, inputs: Any) -> tuple[Compensated, None]:
      some, expected, *rest = inputs
      grads = []
      for g, scale, norm in zip(pull(*rest), some, expected, strict=True):
        # Made anew, it may be rounded differently, and tokens that cancel leave rounding alone.
        again = per_unit_norms([g[None]])
        scale = jnp.where(again > norm, scale * (norm / again), scale)
        grads.append(scaled(g[None], scale)[0])
      return pairs.add(total, Compensated(grads, jax.tree.map(jnp.zeros_like, grads))), None

    zero = pairs.zeros_like([self.params[r] for r in group.roots])
    return jax.lax.scan(body, zero, (scales, norms, *self._inputs(group)))[0]

  def sum(
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
    groups = self.traced.groups
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
    parts: list[list[Compensated]] = [[] for _ in self.params]
    for index, group in enumerate(groups):
      if index in made:
        pair = self.sum_by_unit(group, [scales[r] for r in group.roots], made[index])
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
    return [added(some, p) for some, p in zip(parts, self.params, strict=True)]

  def _precision(self) -> contextlib.AbstractContextManager[Any]:
    return pairs.double_precision() if self.exact else contextlib.nullcontext()

  @property
  def _dtype(self) -> Any:
    return jnp.float64 if self.exact else jnp.float32

  def _from_operands(self, sums: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Sums in the layouts of operands -> by parameter, in its layout."""
    roots = sorted({r for use in sums for r in self.traced.uses[use].weights[0][1].roots})

    def operands(chosen: list[jax.Array]) -> dict[int, jax.Array]:
      params = [p.astype(self._dtype) for p in self.params]
      for root, value in zip(roots, chosen, strict=True):
        params[root] = value
      every = self.traced.rearranged(self.params, params)
      return {use: every[use][0] for use in sums}

    _, pull = jax.vjp(operands, [self.params[r].astype(self._dtype) for r in roots])
    return dict(zip(roots, pull(sums)[0], strict=True))

  def _operand_sums(self, group: Group, scales: jax.Array) -> dict[int, jax.Array]:
    """Clipped sums in the layout of each use's parameter operand."""
    found = {}
    for index in group.uses:
      use = self.traced.uses[index]
      if canonical.is_lookup(use):
        found[index] = rules.lookup_clipped_sum(self._lookup(index), scales, self._dtype)
      elif canonical.is_convolution(use):
        found[index] = self._convolved(index, scales)
      else:
        found[index] = self._contracted(index, scales)
    return found

  def _convolved(self, index: int, scales: jax.Array) -> jax.Array:
    """The sum over units of their scaled gradients, in the layout of the kernel."""
    data, cotangent = self.saved[index][0], self.cotangents[index][0]
    data = zeroed(data, scales).astype(jnp.float32)
    cotangent = scaled(cotangent.astype(jnp.float32), scales)
    return canonical.conv_sum(self.traced.uses[index], data, cotangent, self._dtype)

  def _contracted(self, index: int, scales: jax.Array) -> jax.Array:
    """The same of a product.

    Operands are copied without what is not finite; where they are much larger than the result, a
    part of the units at a time.
    """
    use = self.traced.uses[index]

    def part(data: jax.Array, cotangent: jax.Array, scales: jax.Array) -> jax.Array:
      data = zeroed(data, scales)
      cotangent = scaled(cotangent.astype(jnp.float32), scales)
      return rules.summed(canonical.dot_contraction(use, data, cotangent), self._dtype)

    arrays = (self.saved[index][0], self.cotangents[index][0], scales)
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
    use = self.traced.uses[index]
    if canonical.is_convolution(use):
      return canonical.conv_gradient(use, total)
    return canonical.dot_gradient(use, total)

  def _contraction(self, index: int) -> rules.Contraction:
    use = self.traced.uses[index]
    return canonical.dot_contraction(use, self.saved[index][0], self.cotangents[index][0])

  def _lookup(self, index: int) -> rules.Lookup:
    use = self.traced.uses[index]
    return canonical.lookup_of(use, self.saved[index][0], self.cotangents[index][0])

  def _tied(self, group: Group) -> tuple[int, int]:
    """(the lookup, the product) of a tied table."""
    first, second = group.uses
    return (first, second) if canonical.is_lookup(self.traced.uses[first]) else (second, first)

  def _inputs(self, group: Group) -> tuple[Any, Any]:
    return [self.saved[i] for i in group.uses], [self.cotangents[i] for i in group.uses]

  def _pullback(self, group: Group) -> Callable[[Any, Any], list[jax.Array]]:
    """(saved operands, cotangents) of one unit -> its gradients of the group's parameters."""
    chosen = [self.params[root] for root in group.roots]

    def operands(values: list[jax.Array]) -> list[list[Any]]:
      replaced = list(self.params)
      for root, value in zip(group.roots, values, strict=True):
        replaced[root] = value
      every = self.traced.weights(replaced)
      return [every[i] for i in group.uses]

    weights, to_params = jax.vjp(operands, chosen)

    def pull(saved: list[list[Any]], cotangents: list[list[jax.Array]]) -> list[jax.Array]:
      gradients = [
        to_weights(self.traced.uses[index], weights[i], saved[i], cotangents[i])
        for i, index in enumerate(group.uses)
      ]
      return [g.astype(jnp.float32) for g in to_params(gradients)[0]]

    return pull
