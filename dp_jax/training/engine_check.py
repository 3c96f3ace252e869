"""Compares the fast clipping engine with the reference before step 0, on made-up units."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.engines import Engine
from dp_jax.training.prepare import Run

_UNITS = 3
# Norms of the fast engine are upper bounds, above by rounding alone; sums differ by rounding.
_NORM_TOLERANCE = 1e-4
_NORM_EXCESS = 0.05
_SUM_TOLERANCE = 1e-3
_VANISHING = 1e-12
# It runs once, on three units: compiling takes longer than computing.
_QUICK: dict[str, str | bool] = {
  "xla_backend_optimization_level": "0",
  "xla_llvm_disable_expensive_passes": True,
}

_log = logging.getLogger(__name__)


def choose_engine(run: Run) -> Engine:
  """The engine to train with.

  The comparison uses perturbed parameters (at initial values, gradients may vanish) and units that
  the task makes up, so it tells nothing of the data.

  Returns:
    What the configuration says; "vmap" in place of "auto" if the two disagree, with a warning.

  Raises:
    ValueError: if the configuration insists on "ghost" and the two disagree.
  """
  engine = run.config.train.engine
  if run.privacy is None or engine == "vmap":
    return "vmap"
  problem = _disagreement(run, engine)
  if problem is None:
    return engine
  if engine == "ghost":
    raise ValueError(f"engine 'ghost' disagrees with the reference: {problem}; use 'auto'.")
  _log.warning("warning: clipping by vmap, since the fast engine disagrees with it: %s", problem)
  return "vmap"


def _disagreement(run: Run, engine: Engine) -> str | None:
  params = _perturbed(run.params)
  loss_fn = functools.partial(run.loss, run.frozen)
  units = run.task.made_up_units(_UNITS, run.loader.max_records_per_unit)
  keys = jax.random.split(jax.random.key(0), _UNITS)

  def clipped(name: Engine) -> Any:
    grad_fn = clipped_grad(
      loss_fn, run.mechanism.clip_norm, engine=name, memory_budget=run.config.train.memory_budget
    )
    lowered = jax.jit(grad_fn).lower(params, units, None, keys)
    return lowered.compile(compiler_options=_QUICK)(params, units, None, keys)

  (total, aux), (reference, expected) = clipped(engine), clipped("vmap")
  norms, reference_norms = np.asarray(aux.norms), np.asarray(expected.norms)
  # Both vanish, or both drop the unit: then there is no ratio to compare.
  alike = (norms < _VANISHING) & (reference_norms < _VANISHING)
  alike |= ~np.isfinite(norms) & ~np.isfinite(reference_norms)
  ratio = np.ones(_UNITS)
  np.divide(norms, np.maximum(reference_norms, _VANISHING), out=ratio, where=~alike)
  if not np.all((ratio >= 1 - _NORM_TOLERANCE) & (ratio <= 1 + _NORM_EXCESS)):
    return f"norms differ by factors of {ratio.min():.4g} to {ratio.max():.4g}"
  difference = _norm(jax.tree.map(jnp.subtract, total, reference))
  # Norms that are upper bounds shrink contributions by as much.
  allowed = (_SUM_TOLERANCE + float(np.max(np.abs(ratio - 1)))) * _UNITS * run.mechanism.clip_norm
  return None if difference <= allowed else f"sums differ by {difference:.4g}"


def _perturbed(params: Any) -> Any:
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noise = [0.05 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(structure, [x + n for x, n in zip(leaves, noise, strict=True)])


def _norm(tree: Any) -> float:
  squares = [np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)]
  return float(np.sqrt(sum(squares)))
