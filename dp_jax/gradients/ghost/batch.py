"""A batch of units after its backward pass: norms and gradients of each group of the plan."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.norms import per_unit_norms
from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.arrays import as_pair, materialised, to_weights
from dp_jax.gradients.ghost.chunks import in_chunks, patch_bytes
from dp_jax.gradients.ghost.plan import Group, by_pixels
from dp_jax.gradients.ghost.traced import Traced
from dp_jax.gradients.ghost.uses import Use

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Batch:
  """Cotangents and saved operands of every use.

  Norms take at most `memory_budget` bytes of temporaries, or those of one unit.
  """

  traced: Traced
  params: list[jax.Array]
  weights: list[list[Any]]
  losses: jax.Array
  cotangents: list[list[jax.Array]]
  saved: list[list[jax.Array]]
  memory_budget: int

  @classmethod
  def run(
    cls, traced: Traced, params: list[jax.Array], units: PyTree, keys: Any, memory_budget: int
  ) -> "Batch":
    """The backward pass.

    Args:
      traced: of the loss.
      params: the parameters' leaves.
      units: leaves [B, ...].
      keys: a key a unit, or None.
      memory_budget: bytes of temporaries of norms.
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
    weights = traced.weights(params)
    return cls(traced, params, weights, losses, cotangents, saved, memory_budget)

  def fast_norms(self, group: Group) -> tuple[jax.Array, jax.Array]:
    """As `norms`, of operands that are not scaled; and what squares that vanish may hide."""
    if group.rule == "lookup":
      return self._lookup_norms(group, rules.fast_lookup_norms)
    if group.rule == "tied":
      return self._tied_norms(group, rules.fast_tied_norms)
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

    return jax.lax.map(one, self.inputs(group))

  def _scaled_norms(self, group: Group) -> jax.Array:
    if group.rule == "lookup":
      return self._lookup_norms(group, rules.lookup_norms)
    if group.rule == "tied":
      return self._tied_norms(group, rules.tied_norms)
    use = self.traced.uses[group.uses[0]]
    if canonical.is_convolution(use):
      return self._convolution_norms(use, group, rules.norms)
    return self._product_norms(group, rules.norms)

  def _lookup_norms(self, group: Group, norms: Callable[[Any], Any]) -> Any:
    table = self.lookup(group.uses[0])
    return self._in_chunks(
      lambda rows, cot: norms(rules.Lookup(rows, cot, table.num_rows)),
      (table.rows, table.cotangent), 4 * group.numbers, patches=False,
    )  # fmt: skip

  def _tied_norms(self, group: Group, norms: Callable[[Any, Any], Any]) -> Any:
    lookup, product = self.tied(group)
    table, logits = self.lookup(lookup), self.contraction(product)
    return self._in_chunks(
      lambda rows, rows_cot, x, cot: norms(
        rules.Lookup(rows, rows_cot, table.num_rows), rules.Contraction(x, cot)
      ),
      (table.rows, table.cotangent, logits.operand, logits.cotangent), 4 * group.numbers,
      patches=False,
    )  # fmt: skip

  def _in_chunks(
    self, function: Callable[..., Any], arrays: Any, bytes_per_unit: int, *, patches: bool
  ) -> Any:
    return in_chunks(function, arrays, bytes_per_unit, self.memory_budget, patches=patches)

  def _product_norms(self, group: Group, norms: Callable[[Any], Any]) -> Any:
    contractions = [self.contraction(u) for u in group.uses]
    one = contractions[0] if len(contractions) == 1 else rules.concatenate(contractions)
    return self._in_chunks(
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
    size = 4 * group.numbers if pixels else patch_bytes(use)
    arrays = (self.saved[index][0], self.cotangents[index][0])
    return self._in_chunks(some, arrays, size, patches=True)

  def gradients(self, group: Group) -> list[jax.Array]:
    """Per-unit gradients float32[B, ...]: of the parameters, or of a contraction [B, N, K, O]."""
    uses = [self.traced.uses[i] for i in group.uses]
    size = max((patch_bytes(use) for use in uses if canonical.is_convolution(use)), default=0)
    if group.rule == "instantiate":
      pull = self.pullback(group)
      return self._in_chunks(jax.vmap(pull), self.inputs(group), size, patches=True)
    if group.rule == "convolution":

      def some(data: jax.Array, cotangent: jax.Array) -> jax.Array:
        return rules.gradients(canonical.conv_contraction(uses[0], data, cotangent))

      index = group.uses[0]
      arrays = (self.saved[index][0], self.cotangents[index][0])
      return [self._in_chunks(some, arrays, size, patches=True)]
    contractions = [self.contraction(u) for u in group.uses]
    one = contractions[0] if len(contractions) == 1 else rules.concatenate(contractions)
    return [rules.gradients(one)]

  def norms_by_unit(self, group: Group) -> list[jax.Array]:
    """Norms of instantiated gradients, made and dropped one unit at a time."""
    pull = self.pullback(group)

    def one(inputs: Any) -> list[jax.Array]:
      return [per_unit_norms([g[None]])[0] for g in pull(*inputs)]

    return jax.lax.map(one, self.inputs(group))

  def contraction(self, index: int) -> rules.Contraction:
    """A product as a contraction."""
    use = self.traced.uses[index]
    return canonical.dot_contraction(use, self.saved[index][0], self.cotangents[index][0])

  def lookup(self, index: int) -> rules.Lookup:
    """A lookup of rows of a table."""
    use = self.traced.uses[index]
    return canonical.lookup_of(use, self.saved[index][0], self.cotangents[index][0])

  def tied(self, group: Group) -> tuple[int, int]:
    """(the lookup, the product) of a tied table."""
    first, second = group.uses
    return (first, second) if canonical.is_lookup(self.traced.uses[first]) else (second, first)

  def inputs(self, group: Group) -> tuple[Any, Any]:
    """Saved operands and cotangents of a group's uses."""
    return [self.saved[i] for i in group.uses], [self.cotangents[i] for i in group.uses]

  def pullback(self, group: Group) -> Callable[[Any, Any], list[jax.Array]]:
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


def rearranged(batch: Batch, sums: dict[int, Compensated]) -> list[tuple[int, Compensated]]:
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


def _one_layer(batch: Batch, sums: dict[int, Compensated]) -> list[tuple[int, Compensated]]:
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
