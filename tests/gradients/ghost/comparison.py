"""Compares the ghost engine with the reference engine, and measures what one unit contributes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.ghost.traced import trace

# Fast to compile: the networks are tiny, and run once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Result:
  """What two engines gave for one batch.

  Attributes:
    norms: float64[B] of the ghost engine.
    reference: float64[B] of the vmap engine.
    sum_error: |ghost sum - reference sum| / (|reference sum| or the clip norm if that is larger).
    total: the ghost engine's sum, every pair added in float64.
    expected: the same of the reference.
  """

  norms: np.ndarray
  reference: np.ndarray
  sum_error: float
  total: list[np.ndarray]
  expected: list[np.ndarray]

  def agrees(self, tolerance: float = 1e-5, bound: float = 0.02, smallest: float = 1e-30) -> bool:
    """Whether norms are right, or above by at most a relative rounding bound, and sums right.

    Where a norm is above, so is what the unit loses in the sum. Norms below `smallest` are noise.
    """
    low = np.all(self.norms >= self.reference * (1 - tolerance) - smallest)
    high = np.all(self.norms <= self.reference * (1 + bound) + smallest)
    excess = np.max(self.norms / np.maximum(self.reference, smallest) - 1, initial=0.0)
    return bool(low and high and self.sum_error <= tolerance + max(excess, 0.0))


def values(pair: Any) -> list[np.ndarray]:
  """The leaves of a compensated sum in float64."""
  return [
    np.asarray(s, np.float64) + np.asarray(e, np.float64)
    for s, e in zip(jax.tree.leaves(pair.sum), jax.tree.leaves(pair.error), strict=True)
  ]


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
  """L2 distance of two lists of arrays; infinite where it is NaN."""
  squared = sum(float(np.sum((x - y) ** 2)) for x, y in zip(a, b, strict=True))
  return float(np.sqrt(squared)) if np.isfinite(squared) else float("inf")


def compiled(function: Callable[..., Any], *args: Any, quick: bool = True) -> Callable[..., Any]:
  """A jitted function, compiled for these arguments."""
  return jax.jit(function).lower(*args).compile(QUICK if quick else None)


def compare(
  loss: Callable[..., Any],
  params: Any,
  units: Any,
  keys: Any = None,
  *,
  clip_norm: float = 1.0,
  mask: Any = None,
  engine: str = "auto",
  memory_budget: int = 2**30,
  jit: bool = True,
) -> Result:
  """Clips a batch with both engines, compiled together or not at all."""
  size = jax.tree.leaves(units)[0].shape[0]
  mask = np.arange(size) < size - 1 if mask is None else np.asarray(mask)
  common = {"compensated": True}
  fast = clipped_grad(loss, clip_norm, engine=engine, memory_budget=memory_budget, **common)
  slow = clipped_grad(loss, clip_norm, engine="vmap", **common)

  def both(*args: Any) -> Any:
    return fast(*args), slow(*args)

  args = (params, units, jnp.asarray(mask), keys)
  if jit:
    (total, aux), (expected, reference) = compiled(both, *args)(*args)
  else:
    with jax.disable_jit():
      (total, aux), (expected, reference) = both(*args)
  total, expected = values(total), values(expected)
  scale = max(distance(expected, [np.zeros_like(x) for x in expected]), 1e-3 * clip_norm)
  return Result(
    np.asarray(aux.norms, np.float64)[mask],
    np.asarray(reference.norms, np.float64)[mask],
    distance(total, expected) / scale,
    total,
    expected,
  )


def contributions(
  loss: Callable[..., Any],
  params: Any,
  units: Any,
  keys: Any = None,
  *,
  clip_norm: float = 1.0,
  engine: str = "auto",
  memory_budget: int = 2**30,
) -> np.ndarray:
  """How far removing each unit moves the sum, in float64[B]; one compilation."""
  size = jax.tree.leaves(units)[0].shape[0]
  grad = clipped_grad(loss, clip_norm, engine=engine, compensated=True, memory_budget=memory_budget)
  run = compiled(grad, params, units, jnp.ones(size, bool), keys)
  return moved_by_units(run, params, units, keys)


def moved_by_units(run: Callable[..., Any], params: Any, units: Any, keys: Any) -> np.ndarray:
  """The same of a compiled gradient."""
  size = jax.tree.leaves(units)[0].shape[0]
  whole = values(run(params, units, jnp.ones(size, bool), keys)[0])
  some = [values(run(params, units, jnp.arange(size) != i, keys)[0]) for i in range(size)]
  return np.asarray([distance(whole, without) for without in some])


def plan_of(loss: Callable[..., Any], params: Any, units: Any, keys: Any = None) -> dict[str, str]:
  """Parameter -> "rule: how", in words, of the plan; parameters without use are left out."""
  unit, key = jax.tree.map(lambda x: x[0], (units, keys))
  traced = trace(loss, params, unit, key)
  found: dict[str, str] = {}
  for group in traced.groups:
    for root in group.roots:
      found[traced.paths[root]] = group.rule
  return found


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
  """float32 normal numbers."""
  rng = np.random.default_rng([seed, *shape])
  return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)
