"""One private full-batch step of a head on frozen features at ImageNet's size, on this machine.

    python -m experiments.benchmarks.imagenet_head          all of it, with imagenet_head.json
    python -m experiments.benchmarks.imagenet_head --rows=65536 --json

Made-up rows of the real shape (1,281,167 x 1280 float32, 1000 classes) are drawn shard by shard.
Every shard is then used by each way in turn, so that what else the machine does falls on all alike;
only the use is timed. The ways:

  private   accumulate and finish of the training loop: ghost clipping, compensated sums, noise,
            LAMB
  plain     the same without clipping and noise
  products  the two matrix products that a gradient of these shapes cannot do without, alone
  zero head the closed form from a head of zeros, and the same noise and LAMB; rows in order of
            class, as `dp-jax features` writes them from class folders
  mixed     the same with rows in random order
  read      every row read once and added up (by numpy, on as many threads as the closed form)
  moments   X^T X and X^T Y in the pairs of dp_jax.solvers.least_squares
"""

import argparse
import datetime
import json
import os
import platform
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.gradients.optimizers import make_optimizer
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import split
from dp_jax.privacy import FullBatch, PrivacySpec, calibrate
from dp_jax.solvers.closed_form import ClosedFormSum, zero_head
from dp_jax.tasks.classification import Classification
from dp_jax.training.step import StepFunctions, build_step, init_state

ROWS, FEATURES, CLASSES = 1_281_167, 1280, 1000
SHARD, MICROBATCH = 65_536, 4096
CLIP_NORM, INIT_STD = 1.0, 1e-4
LIMITS = {
  "private / plain": 1.15, "products / private": 0.8, "zero head / read": 4.0, "mixed / read": 4.0
}  # fmt: skip
MEMORY_GB = 4.0
HERE = Path(__file__).parent

Shard = tuple[np.ndarray, np.ndarray]


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


class Clock:
  """Seconds, and seconds of processor time over all cores, by what they were spent on."""

  def __init__(self) -> None:
    self.seconds: dict[str, float] = defaultdict(float)
    self.cpu_seconds: dict[str, float] = defaultdict(float)

  def time(self, name: str, function: Callable[[], Any]) -> Any:
    """Calls a function, waits for its result, and counts the time."""
    start, start_cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function())
    self.seconds[name] += time.perf_counter() - start
    self.cpu_seconds[name] += time.process_time() - start_cpu
    return result


class Step:
  """The training loop's step over microbatches, from a head near zero."""

  def __init__(self, task: Classification, params: Any, rows: int, stddev: float | None):
    optimizer = make_optimizer("lamb", 0.01)
    self.functions: StepFunctions = build_step(
      task.loss, optimizer, clip_norm=None if stddev is None else CLIP_NORM, stddev=stddev or 0.0,
      expected_batch_size=float(rows), ema=0.0,
    )  # fmt: skip
    self.state = init_state(params, optimizer)
    self.total = self.functions.zeros(params)
    bits = np.frombuffer(os.urandom(8), np.uint32)
    self.key = jax.random.wrap_key_data(bits, impl="threefry2x32")

  def add(self, shard: Shard) -> Any:
    """Accumulates a shard, microbatch by microbatch; the last one is padded."""
    rows, labels = shard
    for start in range(0, len(rows), MICROBATCH):
      part, of_part = rows[start : start + MICROBATCH], labels[start : start + MICROBATCH]
      missing = MICROBATCH - len(part)
      if missing:
        part, of_part = np.pad(part, ((0, missing), (0, 0))), np.pad(of_part, (0, missing))
      mask = np.arange(MICROBATCH) < MICROBATCH - missing
      units = {"inputs": part[:, None], "label": of_part[:, None], "record_mask": mask[:, None]}
      ids = np.zeros(MICROBATCH, np.uint32)
      self.total, _ = self.functions.accumulate(
        self.state.params, {}, self.total, units, mask, ids, self.key
      )
    return self.total

  def finish(self, total: Any = None) -> Any:
    """The noise and the optimizer's step."""
    # That of another way has no axis of devices.
    total = self.total if total is None else jax.tree.map(lambda x: x[None], total)
    self.state = self.functions.finish(self.state, total, self.key)
    return self.state


def products() -> Callable[[Shard], Any]:
  """The matrix products of a gradient: rows times head, and rows times derivatives."""
  forward = jax.jit(lambda x, w: x @ w)
  backward = jax.jit(lambda x, d: x.T @ d)
  head = jax.random.normal(jax.random.key(0), (FEATURES, CLASSES))
  derivatives = jax.random.normal(jax.random.key(1), (MICROBATCH, CLASSES))

  def run(shard: Shard) -> Any:
    result = None
    for start in range(0, len(shard[0]), MICROBATCH):
      x = jnp.asarray(shard[0][start : start + MICROBATCH])
      result = jax.block_until_ready((forward(x, head), backward(x, derivatives[: len(x)])))
    return result

  return run


def read(shard: Shard) -> Any:
  """Adds all rows up: each is read once."""
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    parts = np.array_split(shard[0], 16 * (os.cpu_count() or 1))
    return sum(pool.map(lambda part: part.sum(axis=0), parts))


def moments() -> Callable[[Shard], Any] | None:
  """The statistics of least squares, or None where the solver is not there."""
  try:
    from dp_jax.solvers.data import Rows, array_data
    from dp_jax.solvers.statistics import accumulate, cross_moment, second_moment
  except ImportError:
    return None
  both = second_moment(1.0), cross_moment(1.0, CLASSES)

  def run(shard: Shard) -> Any:
    rows = Rows(array_data(*shard, CLASSES, shard_size=MICROBATCH), 1.0, None)
    return [accumulate(rows, statistic) for statistic in both]

  return run


def measure(rows: int) -> dict[str, Any]:
  """Runs all ways over all shards."""
  spec = ModelSpec("linear", {}, (FEATURES,), CLASSES, (-1.0, 1.0))
  model, arrays = split(spec.build(0))
  task = Classification(model, spec)
  zeros = jax.tree.map(jnp.zeros_like, arrays)
  kernel = INIT_STD * jax.random.normal(jax.random.key(0), (FEATURES, CLASSES))
  near = {**zeros, "head.kernel": kernel}
  mechanism = calibrate(PrivacySpec(8.0, 1e-6), FullBatch(), 1, CLIP_NORM)
  stddev = mechanism.stddev
  ways = {"private": Step(task, near, rows, stddev), "plain": Step(task, near, rows, None)}
  closed_step = Step(task, zeros, rows, stddev)
  head = zero_head(task, zeros, {}, CLIP_NORM, "flat")
  assert head is not None
  closed, mixed = ClosedFormSum(head), ClosedFormSum(head)
  others = {"products": products(), "read": read}
  if (statistics := moments()) is not None:
    others["moments"] = statistics
  warm_up(ways, closed_step, others, rows)
  clock, check = Clock(), None
  for index, shard in enumerate(shards(rows)):
    if index == 0:
      check = difference(closed_step, head, (shard[0][:MICROBATCH], shard[1][:MICROBATCH]))
    for name, way in ways.items():
      clock.time(name, lambda way=way, shard=shard: way.add(shard))
    clock.time("zero head", lambda shard=shard: closed.add(*shard))
    labels = np.random.default_rng(index).permutation(shard[1])
    clock.time("mixed", lambda rows=shard[0], labels=labels: mixed.add(rows, labels))
    for name, function in others.items():
      clock.time(name, lambda function=function, shard=shard: function(shard))
    print(f"{min((index + 1) * SHARD, rows)} of {rows} rows", flush=True)
  for name, way in ways.items():
    clock.time(name, lambda way=way: way.finish())
  for name, total in (("zero head", closed), ("mixed", mixed)):
    clock.time(name, lambda total=total: closed_step.finish(total.total()))
  return summary(rows, clock, check, mechanism.noise_multiplier)


def warm_up(ways: dict[str, Step], closed: Step, others: dict[str, Any], rows: int) -> None:
  """Compiles everything on one microbatch; the totals start anew afterwards."""
  shard = next(shards(min(rows, MICROBATCH)))
  for way in (*ways.values(), closed):
    before = jax.tree.map(np.array, way.state)
    way.add(shard)
    way.finish()
    way.state = jax.device_put(before)
    way.total = way.functions.zeros(way.state.params)
  for function in others.values():
    jax.block_until_ready(function(shard))


def difference(step: Step, head: Any, shard: Shard) -> float:
  """How far the closed form is from the general path on one microbatch, relative."""
  step.add(shard)
  closed = ClosedFormSum(head)
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


def main() -> None:
  """Prints a table; writes imagenet_head.json for a run of full size."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--rows", type=int, default=ROWS)
  parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
  arguments = parser.parse_args()
  if arguments.rows < 1:
    parser.error(f"--rows={arguments.rows} must be at least 1")
  result = measure(arguments.rows)
  print("| way | seconds | processor seconds |\n| --- | --- | --- |")
  for name, value in result["seconds"].items():
    print(f"| {name} | {value:.2f} | {result['cpu_seconds'][name]:.2f} |")
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
