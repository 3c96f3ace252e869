"""One private full-batch step of a head on frozen features at ImageNet's size, on this machine.

    python -m experiments.benchmarks.imagenet_head          all of it, with imagenet_head.json
    python -m experiments.benchmarks.imagenet_head --rows=65536 --json

With --compare=FOLDER it also extrapolates from 4,096 rows what jax_privacy's vmap and Opacus's
ghost clipping take, each in an environment that is made in that folder if it is not there.

Made-up rows of the real shape (1,281,167 x 1280 float32, 1000 classes) are drawn shard by shard.
Every shard is then used by each way in turn, so that what else the machine does falls on all alike;
only the use is timed. The ways:

  private   accumulate and finish of the training loop: ghost clipping, compensated sums, noise,
            LAMB
  plain     the same without clipping and noise
  products  the two matrix products that a gradient of these shapes cannot do without, alone, on
            rows that lie where jax wants them
  zero head the closed form from a head of zeros; rows in order of class, as `dp-jax features`
            writes them from class folders
  mixed     the same with rows in random order
  noise, optimizer   after the closed form: the noise and LAMB, once
  read      every row read once and added up (by numpy, on as many threads as the closed form)
  moments   X^T X and X^T Y in the pairs of dp_jax.solvers.least_squares
"""

import argparse
import datetime
import json
import os
import platform
import resource
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import split
from dp_jax.privacy import FullBatch, PrivacySpec, calibrate
from dp_jax.solvers.closed_form import ClosedFormSum, zero_head
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.opening import build_task
from experiments.benchmarks.clipping_compare import compare
from experiments.benchmarks.imagenet_head_ways import (
  CLASSES,
  CLIP_NORM,
  FEATURES,
  MICROBATCH,
  Clock,
  Shard,
  Step,
  moments,
  products,
  read,
)

ROWS, SHARD, INIT_STD = 1_281_167, 65_536, 1e-4
LIMITS = {
  "private / plain": 1.15, "products / private": 0.8, "zero head / read": 4.0, "mixed / read": 4.0
}  # fmt: skip
MEMORY_GB = 4.0
HERE = Path(__file__).parent


def shards(rows: int) -> Iterator[Shard]:
  """Rows and labels; each shard is drawn anew, into the same memory."""
  buffer = np.empty((min(SHARD, rows), FEATURES), np.float32)
  for start in range(0, rows, SHARD):
    part = buffer[: min(SHARD, rows - start)]
    halves = np.array_split(part, 2)

    def fill(half: np.ndarray, seed: int) -> None:
      np.random.Generator(np.random.SFC64(seed)).standard_normal(dtype=np.float32, out=half)

    with ThreadPoolExecutor(2) as pool:
      list(pool.map(fill, halves, (start, start + 1)))
    labels = ((start + np.arange(len(part))) * CLASSES // rows).astype(np.int32)
    yield part, labels


def measure(rows: int) -> dict[str, Any]:
  """Runs all ways over all shards."""
  facts = Classification((FEATURES,), CLASSES, (-1.0, 1.0)).facts()
  spec = ModelSpec("linear", {}, facts)
  model, arrays = split(spec.build(0))
  task = build_task(model, spec)
  zeros = jax.tree.map(jnp.zeros_like, arrays)
  kernel = INIT_STD * jax.random.normal(jax.random.key(0), (FEATURES, CLASSES))
  near = {**zeros, "head.kernel": kernel}
  mechanism = calibrate(PrivacySpec(8.0, 1e-6), FullBatch(), 1, CLIP_NORM)
  stddev = mechanism.stddev
  ways = {"private": Step(task, near, rows, stddev), "plain": Step(task, near, rows, None)}
  closed_step = Step(task, zeros, rows, stddev)
  head = zero_head(task, zeros, {}, CLIP_NORM, "flat")
  assert head is not None
  closed, mixed = (ClosedFormSum(head, "zero_out") for _ in range(2))
  clock = Clock()
  multiply = products(clock)
  others = {"read": read(ThreadPoolExecutor(os.cpu_count())), "moments": moments()}
  warm_up(ways, closed_step, (multiply, *others.values()), rows)
  clock.clear()
  check = None
  for index, shard in enumerate(shards(rows)):
    if index == 0:
      check = difference(closed_step, head, (shard[0][:MICROBATCH], shard[1][:MICROBATCH]))
    for name, way in ways.items():
      clock.time(name, lambda way=way, shard=shard: way.add(shard))
    clock.time("zero head", lambda shard=shard: closed.add(*shard))
    labels = np.random.default_rng(index).permutation(shard[1])
    clock.time("mixed", lambda rows=shard[0], labels=labels: mixed.add(rows, labels))
    multiply(shard)
    for name, function in others.items():
      clock.time(name, lambda function=function, shard=shard: function(shard))
    print(f"{min((index + 1) * SHARD, rows)} of {rows} rows", flush=True)
  for name, way in ways.items():
    clock.time(name, lambda way=way: way.finish())
  total = clock.time("zero head", closed.total)
  clock.time("mixed", mixed.total)
  clock.time("noise, optimizer", lambda: closed_step.finish(total))
  return summary(rows, clock, check, mechanism.noise_multiplier)


def warm_up(ways: dict[str, Step], closed: Step, others: Iterable[Any], rows: int) -> None:
  """Compiles everything on one microbatch; the totals start anew afterwards."""
  shard = next(shards(min(rows, MICROBATCH)))
  for way in (*ways.values(), closed):
    before = jax.tree.map(np.array, way.state)
    total = way.add(shard)
    # That of the closed form is placed otherwise, so compiled for anew.
    way.finish(
      jax.tree.map(lambda x: jnp.asarray(np.array(x[0])), total) if way is closed else None
    )
    way.state = jax.device_put(before)
    way.total = way.functions.zeros(way.state.params)
  for function in others:
    jax.block_until_ready(function(shard))


def difference(step: Step, head: Any, shard: Shard) -> float:
  """How far the closed form is from the general path on one microbatch, relative."""
  step.add(shard)
  closed = ClosedFormSum(head, "zero_out")
  closed.add(*shard)
  got, want = (
    np.concatenate([np.add(x.sum[k], x.error[k], dtype=np.float64).ravel() for k in x.sum])
    for x in (closed.total(), step.total)
  )
  step.total = step.functions.zeros(step.state.params)
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def ratios(seconds: dict[str, float]) -> dict[str, float]:
  """Those that LIMITS names."""
  parts = {name: name.split(" / ") for name in LIMITS}
  return {name: round(seconds[a] / seconds[b], 3) for name, (a, b) in parts.items()}


def summary(rows: int, clock: Clock, check: Any, noise: float) -> dict[str, Any]:
  """Times, ratios, rates and memory. Other work on the machine hardly moves processor time."""
  flops, seconds = 4 * rows * FEATURES * CLASSES, clock.seconds
  return {
    "rows": rows, "features": FEATURES, "classes": CLASSES, "dtype": "float32",
    "microbatch": MICROBATCH, "noise_multiplier": noise,
    "seconds": {name: round(value, 3) for name, value in seconds.items()},
    "ratios": ratios(seconds),
    "cpu_seconds": {name: round(value, 3) for name, value in clock.cpu_seconds.items()},
    "cpu_ratios": ratios(clock.cpu_seconds),
    "limits": LIMITS,
    "gflops": {
      name: round(flops / seconds[name] / 1e9, 1) for name in ("private", "plain", "products")
    },
    "read_gb_per_second": round(4e-9 * rows * FEATURES / seconds["read"], 2),
    "closed_form_difference": check,
    "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    "date": datetime.date.today().isoformat(),
    "machine": f"{os.cpu_count()}-core {platform.machine()} CPU, jax {jax.__version__}",
  }  # fmt: skip


def others_extrapolated(rows: int, folder: Path) -> dict[str, Any]:
  """Seconds that other libraries would take for a step, from one over 4,096 rows."""
  found = compare(["head"], 1, folder)
  theirs = {name: each["results"].get("head") or {} for name, each in found.items()}
  ratios = {
    "jax_privacy vmap": ("jax_privacy", "time_ratio"),
    "Opacus ghost": ("opacus", "ghost_time_ratio"),
  }
  seconds = {
    way: round(theirs[name]["plain_seconds"] * theirs[name][ratio] * rows / 4096, 1)
    for way, (name, ratio) in ratios.items()
    if theirs[name].get(ratio)
  }
  return {"seconds": seconds, "of 4096 rows": found}


def main() -> None:
  """Prints a table; writes imagenet_head.json for a run of full size."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--rows", type=int, default=ROWS)
  parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
  parser.add_argument("--compare", type=Path, metavar="FOLDER", help="also run other libraries")
  arguments = parser.parse_args()
  if arguments.rows < 1:
    parser.error(f"--rows={arguments.rows} must be at least 1")
  result = measure(arguments.rows)
  if arguments.compare:
    result["others"] = others_extrapolated(arguments.rows, arguments.compare)
  print("| way | seconds | processor seconds |\n| --- | --- | --- |")
  for name, value in result["seconds"].items():
    print(f"| {name} | {value:.2f} | {result['cpu_seconds'][name]:.2f} |")
  for name, value in result.get("others", {}).get("seconds", {}).items():
    print(f"| {name}, extrapolated | {value} | |")
  for name, limit in LIMITS.items():
    sign = "at least" if name.startswith("products") else "at most"
    both = f"{result['ratios'][name]}, of processor time {result['cpu_ratios'][name]}"
    print(f"{name}: {both} ({sign} {limit})")
  print(f"peak memory: {result['peak_memory_gb']} GB (at most {MEMORY_GB})")
  print(f"closed form against the general path: {result['closed_form_difference']:.1e}")
  if arguments.rows == ROWS:
    (HERE / "imagenet_head.json").write_text(json.dumps(result, indent=2) + "\n")
  if arguments.json:
    print(json.dumps(result))


if __name__ == "__main__":
  main()
