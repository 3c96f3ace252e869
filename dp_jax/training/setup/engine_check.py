"""Compares the fast clipping engine with a loop over units before step 0, on made-up units."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.engines.dispatch import Engine
from dp_jax.gradients.per_unit import inner_jaxprs
from dp_jax.training.setup.prepare import Run

_UNITS = 3
# Norms of the fast engine are upper bounds, above by rounding alone; sums differ by rounding.
_NORM_TOLERANCE = 1e-4
_NORM_EXCESS = 0.05
_SUM_TOLERANCE = 1e-3
_VANISHING = 1e-12
# Of what numbers of the coarsest dtype are rounded by: what a sum may differ by relative to itself,
# and how far parameters are moved to see what rounding alone does to it.
_ROUNDINGS = 4
# How often that, since the engines round at other places.
_NOISE = 8
# It runs once, on three units: compiling takes longer than computing.
_QUICK: dict[str, str | bool] = {
  "xla_backend_optimization_level": "0",
  "xla_llvm_disable_expensive_passes": True,
}

_log = logging.getLogger(__name__)


def choose_engine(run: Run) -> Engine:
  """The engine to train with.

  The comparison uses perturbed parameters (at initial values, gradients may vanish), units that
  the task makes up, so that it tells nothing of the data, and the run's own style of clipping. The
  reference takes one unit at a time, and so cannot mix them. Every parameter is compared by itself.

  Returns:
    What the configuration says; "loop" in place of "auto" if the two disagree, with a warning.

  Raises:
    ValueError: if the configuration insists on "ghost" and the two disagree.
  """
  engine = run.config.train.engine
  if run.privacy is None or engine == "vmap":
    return "vmap"
  if engine == "loop":
    return engine
  problem = _disagreement(run, engine)
  if problem is None:
    return engine
  if engine == "ghost":
    raise UserError(f"engine 'ghost' disagrees with the reference: {problem}; use 'auto'.")
  _log.warning("warning: clipping in a loop, since the fast engine disagrees with it: %s", problem)
  return "loop"


def _disagreement(run: Run, engine: Engine) -> str | None:
  params = _moved(run.params, lambda x: jnp.full(x.shape, 0.05, x.dtype))
  loss_fn = functools.partial(run.loss, run.frozen)
  units = run.task.made_up_units(_UNITS, run.loader.max_records_per_unit)
  keys = jax.random.split(jax.random.key(0), _UNITS)

  def compiled(name: Engine) -> Callable[[Any], Any]:
    grad_fn = clipped_grad(
      loss_fn, run.mechanism.clip_norm, engine=name, clipping=run.config.privacy.clipping,
      compensated=True, memory_budget=run.config.train.memory_budget,
      exact=run.mechanism.adjacency == "add_or_remove_one",
    )  # fmt: skip
    lowered = jax.jit(grad_fn).lower(params, units, None, keys)
    program = lowered.compile(compiler_options=_QUICK)
    return lambda params: program(params, units, None, keys)

  reference = compiled("loop")
  (total, aux), (expected, seen) = compiled(engine)(params), reference(params)
  ratios = _ratios(np.asarray(aux.norms), np.asarray(seen.norms))
  if not np.all((ratios >= 1 - _NORM_TOLERANCE) & (ratios <= 1 + _NORM_EXCESS)):
    return f"norms differ by factors of {ratios.min():.4g} to {ratios.max():.4g}"
  one, one_key = jax.tree.map(lambda x: x[0], (units, keys))
  rounding = _coarsest(jax.make_jaxpr(loss_fn)(params, one, one_key).jaxpr)
  # Norms that are upper bounds shrink contributions by as much, and units may point apart.
  excess = _UNITS * float(np.max(np.abs(ratios - 1)))

  def moved() -> pairs.Compensated:
    return reference(_moved(params, lambda x: _ROUNDINGS * rounding * jnp.abs(x)))[0]

  return _of_sums(total, expected, moved, rounding, excess)


def _ratios(norms: np.ndarray, reference: np.ndarray) -> np.ndarray:
  # Both vanish, or both drop the unit: then there is no ratio to compare.
  alike = (norms < _VANISHING) & (reference < _VANISHING)
  alike |= ~np.isfinite(norms) & ~np.isfinite(reference)
  ratios = np.ones(len(norms))
  np.divide(norms, np.maximum(reference, _VANISHING), out=ratios, where=~alike)
  return ratios


def _of_sums(
  total: pairs.Compensated,
  expected: pairs.Compensated,
  moved: Callable[[], pairs.Compensated],
  rounding: float,
  excess: float,
) -> str | None:
  """Which parameter's sum differs from the reference by more than rounding, relative to itself.

  Args:
    total: what is judged.
    expected: the reference.
    moved: the reference at parameters that are moved by as much as rounding moves values. A sum in
      which everything cancels is noise in both engines, and this tells how much.
    rounding: of the coarsest numbers, relative to themselves.
    excess: of the norms, relative to themselves.
  """
  sizes, differences = _distances(expected, None), _distances(total, expected)
  tolerance = max(_SUM_TOLERANCE, _ROUNDINGS * rounding) + excess
  pairs_of = enumerate(zip(differences, sizes, strict=True))
  different = [i for i, (difference, size) in pairs_of if not difference <= tolerance * size]
  noise = _distances(moved(), expected) if different else []
  for i in different:
    # What is zero in the reference may be rounding in the other.
    floor = _NOISE * noise[i] if sizes[i] > 0 else rounding * float(np.linalg.norm(sizes))
    if not differences[i] <= tolerance * sizes[i] + floor:
      path = jax.tree_util.tree_leaves_with_path(expected.sum)[i][0]
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      return f"sums of {name} differ by {differences[i]:.4g}, where one is {sizes[i]:.4g} long"
  return None


def _distances(pair: pairs.Compensated, other: pairs.Compensated | None) -> list[float]:
  """The norms of two sums' difference, or of one sum, parameter by parameter."""

  def of_leaf(*leaves: jax.Array) -> float:
    total, error, *rest = (np.asarray(x, np.float64).ravel() for x in leaves)
    return float(np.linalg.norm(total + error - sum(rest)))

  trees = pair if other is None else (*pair, *other)
  return jax.tree.leaves(jax.tree.map(of_leaf, *trees))


def _coarsest(jaxpr: Any) -> float:
  """What the shortest floating-point numbers of a program are rounded by, of themselves."""
  found = float(np.finfo(np.float32).eps)
  for eqn in jaxpr.eqns:
    for var in eqn.outvars:
      dtype = getattr(var.aval, "dtype", None)
      if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        found = max(found, float(jnp.finfo(dtype).eps))
    found = max([found, *(_coarsest(inner) for inner in inner_jaxprs(eqn.params))])
  return found


def _moved(params: Any, scale: Callable[[jax.Array], jax.Array]) -> Any:
  """Parameters with normal numbers added to them, of a standard deviation a leaf."""
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  moved = [
    x + scale(x) * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, moved)
