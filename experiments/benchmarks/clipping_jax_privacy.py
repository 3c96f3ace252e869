"""jax_privacy's `clipped_grad` on the models of the clipping benchmark; prints JSON.

Run by `clipping.py --compare`, in an environment that has jax, flax and jax-privacy:

    python -m experiments.benchmarks.clipping_jax_privacy --models=head,gpt_10m --repeats=3
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy

from experiments.benchmarks.clipping_models import ROWS, Case

# Bytes of per-unit gradients of one microbatch, and seconds of one run, beyond which a microbatch
# size is given up.
MEMORY_LIMIT = 4 * 2**30
TIME_LIMIT = 60.0


def compiled(case: Case, args: tuple[Any, ...], microbatch_size: int | None, plain: bool) -> Any:
  """(params, frozen, units) -> gradient: plain, or clipped and summed."""

  def run(params: Any, frozen: Any, units: Any) -> Any:
    if plain:
      return jax.grad(lambda p: jnp.sum(jax.vmap(lambda unit: case.loss(p, frozen, unit))(units)))(
        params
      )
    grad_fn = jax_privacy.clipped_grad(
      lambda p, unit: case.loss(p, frozen, unit), l2_clip_norm=1.0, keep_batch_dim=False,
      microbatch_size=microbatch_size,
    )  # fmt: skip
    return grad_fn(params, units)

  return jax.jit(run).lower(*args).compile()


def seconds(function: Any, args: tuple[Any, ...]) -> float:
  """Of one run."""
  start = time.perf_counter()
  jax.block_until_ready(function(*args))
  return time.perf_counter() - start


def measure(name: str, repeats: int) -> dict[str, Any]:
  """Times of plain and of each microbatch size, interleaved; the best size is picked from them."""
  row = ROWS[name]
  case = row.make(row.batch)
  args = jax.device_put((case.params, case.frozen, case.units))
  size = sum(x.size for x in jax.tree.leaves(case.params))
  functions = {"plain": compiled(case, args, None, plain=True)}
  seconds(functions["plain"], args)
  for microbatch in sorted({1, 4, 16, 64, row.batch}):
    if row.batch % microbatch or 4 * size * microbatch > MEMORY_LIMIT:
      continue
    function = compiled(case, args, microbatch, plain=False)
    if seconds(function, args) < TIME_LIMIT:
      functions[str(microbatch)] = function
  times: dict[str, list[float]] = {key: [] for key in functions}
  for _ in range(repeats):
    for key, function in functions.items():
      times[key].append(seconds(function, args))
  plain = statistics.median(times.pop("plain"))
  if not times:
    return {"time_ratio": None, "why": f"no microbatch size within {TIME_LIMIT:.0f} s a step"}
  ratios = {key: statistics.median(found) / plain for key, found in times.items()}
  best = min(ratios, key=lambda key: ratios[key])
  temporary = {key: f.memory_analysis().temp_size_in_bytes for key, f in functions.items()}
  return {
    "plain_seconds": plain, "microbatch_size": int(best), "time_ratio": ratios[best],
    "memory_ratio": temporary[best] / temporary["plain"], "ratios_by_microbatch_size": ratios,
  }  # fmt: skip


def main() -> None:
  """Prints one JSON object: model -> result."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--models", required=True)
  parser.add_argument("--repeats", type=int, default=3)
  options = parser.parse_args()
  results = {}
  for name in options.models.split(","):
    results[name] = measure(name, options.repeats)
    print(name, results[name], file=sys.stderr, flush=True)
    jax.clear_caches()
  print(json.dumps({"version": jax_privacy.__version__, "results": results}))


if __name__ == "__main__":
  main()
