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

# Bytes of per-unit gradients of one microbatch beyond which its size is not tried.
MEMORY_LIMIT = 4 * 2**30
# Sizes whose first run took this many times that of the best are not timed again.
NEARLY_BEST = 1.5


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
  """The best microbatch size, in turn with plain; what a first run shows to be slow is left."""
  row = ROWS[name]
  case = row.make(row.batch)
  args = jax.device_put((case.params, case.frozen, case.units))
  size = sum(x.size for x in jax.tree.leaves(case.params))
  plain = compiled(case, args, None, plain=True)
  seconds(plain, args)
  functions, first = {}, {}
  for microbatch in sorted({1, 4, 16, 64, row.batch}):
    if row.batch % microbatch or 4 * size * microbatch > MEMORY_LIMIT:
      continue
    function = compiled(case, args, microbatch, plain=False)
    first[microbatch] = seconds(function, args)
    if first[microbatch] < NEARLY_BEST * min(first.values()):
      functions[microbatch] = function
  ratios: dict[int, list[float]] = {
    key: [] for key in functions if first[key] < NEARLY_BEST * min(first.values())
  }
  plain_times = []
  for _ in range(repeats):
    plain_times.append(seconds(plain, args))
    for key, found in ratios.items():
      found.append(seconds(functions[key], args) / plain_times[-1])
  medians = {key: statistics.median(found) for key, found in ratios.items()}
  best = min(medians, key=lambda key: medians[key])
  temporary = [f.memory_analysis().temp_size_in_bytes for f in (functions[best], plain)]
  return {
    "plain_seconds": statistics.median(plain_times), "microbatch_size": best,
    "time_ratio": medians[best], "memory_ratio": temporary[0] / temporary[1],
    "first_seconds_by_microbatch_size": first,
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
