"""The ghost engine: clipped sum and norms of a batch of units in one backward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost.arrays import as_pair
from dp_jax.gradients.ghost.batch import Batch
from dp_jax.gradients.ghost.interpreter import evaluate
from dp_jax.gradients.ghost.plan import KNOWN, Group, make_plan
from dp_jax.gradients.ghost.sums import Sums
from dp_jax.gradients.ghost.uses import Recorder, Tapper, UnsupportedError, Use, Value
from dp_jax.gradients.norms import quick_norms, total_norms
from dp_jax.gradients.styles import ClipRule

PyTree = Any

# How much of a norm may be lost to squares below the range of float32.
_SLACK = 2.0**-20


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
