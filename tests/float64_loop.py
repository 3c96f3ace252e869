"""Clipped sums in float64 by a loop over units, with jax.grad alone: what engines are judged by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.gradients.clipping import clipped_grad

# Fast to compile: losses are tiny, and run once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Of `dp_jax.gradients.engines.norms`: gradients are clipped to so much less than the clip norm.
MARGIN = 2.0**-10
ENGINES = ("vmap", "loop", "ghost", "auto")


def loop_in_float64(
  loss: Callable[..., Any], params: Any, units: Any, clip_norm: float = 1.0, *, jit: bool = True
) -> tuple[list[np.ndarray], np.ndarray]:
  """The leaves of the clipped sum, and the norms of the units, float64."""
  with jax.enable_x64(True):
    params, units = jax.tree.map(_wide, (params, units))
    size = jax.tree.leaves(units)[0].shape[0]

    def every(params: Any, units: Any) -> list[Any]:
      one = [jax.tree.map(lambda x, i=i: x[i], units) for i in range(size)]
      return [jax.grad(loss)(params, unit, None) for unit in one]

    if jit:
      grads = jax.jit(every).lower(params, units).compile(QUICK)(params, units)
    else:
      with jax.disable_jit():
        grads = every(params, units)
    by_unit = [[np.asarray(g, np.float64) for g in jax.tree.leaves(grad)] for grad in grads]
  norms = np.asarray([np.sqrt(sum(np.sum(g**2) for g in unit)) for unit in by_unit])
  scales = np.minimum(1.0, clip_norm * (1 - MARGIN) / np.maximum(norms, 1e-300))
  total = [
    sum(s * g for s, g in zip(scales, leaves, strict=True)) for leaves in zip(*by_unit, strict=True)
  ]
  return total, norms


def errors(
  loss: Callable[..., Any],
  params: Any,
  units: Any,
  engines: Sequence[str] = ENGINES,
  clip_norm: float = 1.0,
) -> dict[str, float]:
  """For each engine, |sum - reference| over the clip norm; infinite where norms are wrong."""
  expected, norms = loop_in_float64(loss, params, units, clip_norm)
  fns = [clipped_grad(loss, clip_norm, engine=engine) for engine in engines]
  every = jax.jit(lambda *args: [fn(*args) for fn in fns]).lower(params, units).compile(QUICK)
  found = {}
  for engine, (total, aux) in zip(engines, every(params, units), strict=True):
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(total)]
    squares = [np.sum((x - y) ** 2) for x, y in zip(leaves, expected, strict=True)]
    error = float(np.sqrt(sum(squares))) / clip_norm
    right = np.allclose(aux.norms, norms, rtol=2e-3, atol=1e-5)
    found[engine] = error if right else float("inf")
  return found


def _wide(x: Any) -> Any:
  x = np.asarray(x)
  return jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else x.dtype)
