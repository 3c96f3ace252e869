"""The ways of `imagenet_head.py` to a gradient, or to a part of it, each on a shard of rows."""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.gradients.optimizers import make_optimizer
from dp_jax.solvers.feature_units import Rows, array_data
from dp_jax.solvers.statistics import accumulate, cross_moment, second_moment
from dp_jax.tasks.classification import Classification
from dp_jax.training.step import StepFunctions, build_step, init_state

FEATURES, CLASSES = 1280, 1000
MICROBATCH, PRODUCT_ROWS = 1024, 4096
CLIP_NORM = 1.0

Shard = tuple[np.ndarray, np.ndarray]


class Clock:
  """Seconds, and seconds of processor time over all cores, by what they were spent on."""

  def __init__(self) -> None:
    self.seconds: dict[str, float] = defaultdict(float)
    self.cpu_seconds: dict[str, float] = defaultdict(float)

  def clear(self) -> None:
    """Forgets all."""
    self.seconds.clear()
    self.cpu_seconds.clear()

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


def products(clock: Clock) -> Callable[[Shard], None]:
  """The matrix products of a gradient: rows times head, and rows times derivatives."""
  forward = jax.jit(lambda x, w: x @ w)
  backward = jax.jit(lambda x, d: x.T @ d)
  head = jax.random.normal(jax.random.key(0), (FEATURES, CLASSES))
  derivatives = jax.random.normal(jax.random.key(1), (PRODUCT_ROWS, CLASSES))

  def run(shard: Shard) -> None:
    for start in range(0, len(shard[0]), PRODUCT_ROWS):
      x = jnp.array(shard[0][start : start + PRODUCT_ROWS])
      of_x = jax.block_until_ready((x, derivatives[: len(x)]))
      clock.time("products", lambda of_x=of_x: (forward(of_x[0], head), backward(*of_x)))

  return run


def read(pool: ThreadPoolExecutor) -> Callable[[Shard], Any]:
  """Adds all rows up: each is read once."""
  cores = os.cpu_count() or 1

  def run(shard: Shard) -> Any:
    return sum(pool.map(lambda part: part.sum(axis=0), np.array_split(shard[0], 16 * cores)))

  return run


def moments() -> Callable[[Shard], Any]:
  """The statistics of least squares."""
  both = second_moment(1.0), cross_moment(1.0, CLASSES)

  def run(shard: Shard) -> Any:
    rows = Rows(array_data(*shard, CLASSES, shard_size=PRODUCT_ROWS), 1.0, None)
    return [accumulate(rows, statistic) for statistic in both]

  return run
