"""The loss of one unit, taken apart: its jaxpr, where parameters are used, and the plan."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dp_jax.gradients.ghost.interpreter import evaluate
from dp_jax.gradients.ghost.plan import KNOWN, Group, make_plan
from dp_jax.gradients.ghost.uses import Recorder, Tapper, UnsupportedError, Use, Value

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
