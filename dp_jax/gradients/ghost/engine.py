"""The ghost engine: clipped sum and norms of a batch of units in one backward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import canonical, rules
from dp_jax.gradients.ghost.interpreter import (
  Recorder,
  Tapper,
  UnsupportedError,
  Use,
  Value,
  evaluate,
)
from dp_jax.gradients.ghost.plan import KNOWN, Group, make_plan
from dp_jax.gradients.norms import per_unit_norms, scaled, total_norms
from dp_jax.gradients.styles import ClipRule

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Traced:
  """The loss of one unit, taken apart.

  Attributes:
    jaxpr: closed; its inputs are the parameters' leaves, then those of unit and key.
    num_params: how many leaves are parameters.
    uses: in the order of the evaluation.
    groups: the plan.
    paths: the parameters' names.
  """

  jaxpr: Any
  num_params: int
  uses: tuple[Use, ...]
  groups: tuple[Group, ...]
  paths: tuple[str, ...]

  def weights(self, params: Sequence[Any]) -> list[list[Any]]:
    """The parameter operands of each use, as a function of the parameters."""
    recorder = Recorder()
    self._evaluate(params, None, recorder)
    return recorder.weights

  def rearranged(self, params: Sequence[Any], exact: Sequence[Any]) -> list[list[Any]]:
    """The same of `exact`, a float32 copy, without conversions; None where it is not linear."""
    recorder = Recorder()
    self._evaluate(params, None, recorder, exact)
    return recorder.exact

  def loss(
    self, params: Sequence[Any], taps: Any, data: Sequence[Any]
  ) -> tuple[jax.Array, list[list[Any]]]:
    """The loss with taps, and the data operands of each use."""
    tapper = Tapper(taps)
    (out,) = self._evaluate(params, data, tapper)
    return out.array, tapper.saved

  def _evaluate(
    self,
    params: Sequence[Any],
    data: Sequence[Any] | None,
    visitor: Any,
    exact: Sequence[Any] | None = None,
  ) -> Any:
    pairs_of = zip(params, exact or params, strict=True)
    inputs = [Value.parameter(p, i, x) for i, (p, x) in enumerate(pairs_of)]
    rest = self.jaxpr.jaxpr.invars[self.num_params :]
    inputs += [Value(None if data is None else x, True) for x in (data or rest)]
    consts = [Value(c) for c in self.jaxpr.consts]
    return evaluate(self.jaxpr.jaxpr, consts, inputs, visitor)


def trace(loss_fn: Callable[..., Any], params: PyTree, unit: PyTree, key: Any) -> Traced:
  """Traces a loss and makes the plan; nothing is computed.

  Args:
    loss_fn: (params, unit, key) -> scalar.
    params: the parameters.
    unit: one unit, arrays or shapes.
    key: one key, or None.

  Raises:
    UnsupportedError: where no rule is sound: the loss does not depend on the unit, a scan mixes
      what it collects, complex numbers, while loops, mutable references.
    ValueError: if a parameter is not real.
  """
  jaxpr = jax.make_jaxpr(loss_fn)(params, unit, key)
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  paths = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat)
  leaves = [leaf for _, leaf in flat]
  start = Traced(jaxpr, len(leaves), (), (), paths)
  recorder = Recorder()

  def record(params: Sequence[Any]) -> None:
    (out,) = start._evaluate(params, None, recorder)
    if not out.is_data:
      raise UnsupportedError("the loss does not depend on the unit")

  record(leaves)
  groups = make_plan(recorder.uses, [leaf.size for leaf in leaves])
  return dataclasses.replace(start, uses=tuple(recorder.uses), groups=tuple(groups))


def check_known(traced: Traced) -> None:
  """Refuses primitives that have no rule of their own.

  Raises:
    UnsupportedError: naming the primitive and the parameter.
  """
  for use in traced.uses:
    if use.name not in KNOWN:
      names = sorted({traced.paths[r] for _, origin in use.weights for r in origin.roots})
      raise UnsupportedError(
        f"engine 'ghost' has no rule for the primitive {use.name!r}, which uses the parameter"
        f" {', '.join(names)}; engine 'auto' clips it by that parameter's own per-unit gradients"
      )


def clipped_sum(
  traced: Traced,
  params: PyTree,
  units: PyTree,
  mask: jax.Array,
  keys: Any,
  rule: ClipRule,
  memory_budget: int,
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
      one unit at a time, twice.

  Returns:
    The sum as a pair, the upper bounds of the norms float32[B], and the losses [B].
  """
  leaves, structure = jax.tree.flatten(params)
  batch = _Batch.run(traced, leaves, units, keys)
  kept: dict[int, list[jax.Array]] = {}
  # Of each clipping group; a parameter that is never used has none.
  parts = [[jnp.zeros(mask.shape, jnp.float32)] for _ in rule.bounds]
  made: dict[int, list[jax.Array]] = {}
  for index, group in enumerate(traced.groups):
    if group.rule == "instantiate":
      size = mask.shape[0] * group.numbers * 4
      if size <= memory_budget:
        memory_budget -= size
        kept[index] = batch.instantiate(group)
        by_root = [per_unit_norms([g]) for g in kept[index]]
      else:
        by_root = made[index] = batch.norms_by_unit(group)
    else:
      by_root = [batch.norms(group)]
    for root, norm in zip(group.roots, by_root, strict=True):
      parts[rule.group_of[root]].append(norm)
  norms = jnp.stack([total_norms(jnp.stack(part)) for part in parts])
  total = batch.sum(rule.by_leaf(rule.scales(norms, mask)), kept, made)
  return _unflatten(structure, total), rule.combine(norms), batch.losses


@dataclasses.dataclass(frozen=True)
class _Batch:
  """A batch after its backward pass: cotangents and saved operands of every use."""

  traced: Traced
  params: list[jax.Array]
  weights: list[list[Any]]
  losses: jax.Array
  cotangents: list[list[jax.Array]]
  saved: list[list[jax.Array]]

  @classmethod
  def run(cls, traced: Traced, params: list[jax.Array], units: PyTree, keys: Any) -> "_Batch":
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
    saved, cotangents = jax.tree.map(_materialised, (saved, cotangents))
    return cls(traced, params, traced.weights(params), losses, cotangents, saved)

  def norms(self, group: Group) -> jax.Array:
    """Norms of a group that is never made whole; it has one parameter."""
    if group.rule == "lookup":
      return rules.lookup_norms(self._lookup(group.uses[0]))
    if group.rule == "tied":
      lookup, product = self._tied(group)
      return rules.tied_norms(self._lookup(lookup), self._contraction(product))
    return rules.norms(
      rules.concatenate([self._contraction(u) for u in group.uses])
      if len(group.uses) > 1
      else self._contraction(group.uses[0])
    )

  def instantiate(self, group: Group) -> list[jax.Array]:
    """Per-unit gradients of the group's parameters, float32[B, ...] each."""
    pull = self._pullback(group)
    return jax.vmap(pull)(*self._inputs(group))

  def norms_by_unit(self, group: Group) -> list[jax.Array]:
    """Norms of such gradients, made and dropped one unit at a time."""
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
  ) -> list[Compensated]:
    """The clipped sum of every parameter.

    Args:
      scales: float32[B] of each parameter.
      kept: gradients of the groups that were made and kept.
      made: norms of the groups that were made and dropped.
    """
    totals: list[Compensated] = [pairs.zeros_like(p) for p in self.params]
    operands: dict[int, jax.Array] = {}
    for index, group in enumerate(self.traced.groups):
      if group.rule != "instantiate":
        for use, gradient in self._operand_sums(group, scales[group.roots[0]]):
          operands[use] = gradient
        continue
      some = [scales[root] for root in group.roots]
      if index in kept:
        part = pairs.sum_units([scaled(g, s) for g, s in zip(kept[index], some, strict=True)])
      else:
        part = self.sum_by_unit(group, some, made[index])
      for root, total, error in zip(group.roots, part.sum, part.error, strict=True):
        totals[root] = pairs.add(totals[root], Compensated(total, error))
    return [
      pairs.add(total, Compensated(extra, jnp.zeros_like(extra)))
      for total, extra in zip(totals, self._from_operands(operands), strict=True)
    ]

  def _from_operands(self, sums: dict[int, jax.Array]) -> list[jax.Array]:
    """Sums in the layouts of operands -> in those of the parameters, in float32."""

    def operands(params: list[jax.Array]) -> dict[int, jax.Array]:
      every = self.traced.rearranged(self.params, params)
      return {use: every[use][0] for use in sums}

    _, pull = jax.vjp(operands, [p.astype(jnp.float32) for p in self.params])
    return pull(sums)[0]

  def _operand_sums(self, group: Group, scales: jax.Array) -> list[tuple[int, jax.Array]]:
    """Clipped sums in the layout of each use's parameter operand."""
    if group.rule == "lookup":
      lookup = self._lookup(group.uses[0])
      return [(group.uses[0], rules.lookup_clipped_sum(lookup, scales))]
    if group.rule == "tied":
      lookup_use, product = self._tied(group)
      rows = rules.lookup_clipped_sum(self._lookup(lookup_use), scales)
      return [(lookup_use, rows), (product, self._contracted(product, scales))]
    return [(use, self._contracted(use, scales)) for use in group.uses]

  def _contracted(self, index: int, scales: jax.Array) -> jax.Array:
    use = self.traced.uses[index]
    total = rules.clipped_sum(self._contraction(index), scales)
    if canonical.is_convolution(use):
      return canonical.conv_gradient(use, total)
    return canonical.dot_gradient(use, total)

  def _contraction(self, index: int) -> rules.Contraction:
    use = self.traced.uses[index]
    make = (
      canonical.conv_contraction if canonical.is_convolution(use) else canonical.dot_contraction
    )
    return make(use, self.saved[index][0], self.cotangents[index][0])

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
      gradients = []
      for position, index in enumerate(group.uses):
        use = self.traced.uses[index]
        _, to_weights = jax.vjp(
          lambda w, use=use, d=saved[position]: use.apply(w, d), weights[position]
        )
        gradients += to_weights(cotangents[position])
      return [g.astype(jnp.float32) for g in to_params(gradients)[0]]

    return pull


def _materialised(x: jax.Array) -> jax.Array:
  return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.optimization_barrier(x)


def _unflatten(structure: Any, totals: list[Compensated]) -> Compensated:
  return Compensated(
    jax.tree.unflatten(structure, [t.sum for t in totals]),
    jax.tree.unflatten(structure, [t.error for t in totals]),
  )
