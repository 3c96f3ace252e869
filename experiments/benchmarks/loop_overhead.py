"""Time that the loop adds to the compiled step: sampling, loading, keys, transfers, logs, progress.

    python -m experiments.benchmarks.loop_overhead --out=experiments/benchmarks/loop_overhead.json

The loop with its hooks, as a run has them, against the same compiled calls back to back on the same
batches, ready on the device. Overhead is the difference as a share of the loop's time. Blocks of
calls and of the loop take turns; each block of the loop is compared with the calls just before and
after it, and the median over all is given, with the quartiles. Checkpoints are left out.

An accelerator computes beside the host. A CPU does not: its "device" is made of the host's cores,
and what the host does takes time from it. So with `NPROC=1` in the environment, which leaves the
device one core and, of two, the host the other, the figure is that of a device of its own with such
steps; without, all cores compute, and the figure is that of a run on this CPU.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dp_jax.config.run_config import Config
from dp_jax.parallel.stopping import StopSignal
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.hooks import Hook, ProgressHook
from dp_jax.training.loop import Loop, follow
from dp_jax.training.progress import Progress
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import TrainState, init_state

WARM_UP = 3


def config(width: int, rate: float) -> Config:
  """One device call a step, of nearly all 1,437 scans times the rate."""
  return Config.from_dict({
    "data": {"source": "digits", "declared": "public"},
    "model": {"widths": [width, 2 * width], "strides": [1, 2]},
    "privacy": {"epsilon": 4.0, "delta": 1e-4, "sampling_rate": rate, "accountant": "rdp"},
    "train": {"steps": 10_000, "ema": 0.9, "microbatch_size": round(1437 * rate * 1.4)},
  })  # fmt: skip


class Took(NamedTuple):
  """Of some steps.

  Attributes:
    seconds: by the clock.
    here: processor seconds of this thread.
  """

  seconds: float
  here: float


@contextlib.contextmanager
def timing(took: list[Took]) -> Iterator[None]:
  """Appends what the block took."""
  began, began_here = time.perf_counter(), time.thread_time()
  yield
  took.append(Took(time.perf_counter() - began, time.thread_time() - began_here))


def bare(loop: Loop, state: TrainState, steps: range, took: list[Took]) -> TrainState:
  """The compiled calls alone, of the same steps."""
  ready = []
  for step in steps:
    _, *keys, piece = loop._inputs(step)
    assert piece is not None, "a step of more than one call"
    ready.append((*piece, *keys))
  jax.block_until_ready((ready, state))
  with timing(took):
    for inputs in ready:
      state, _ = loop.functions.whole(state, loop.run.frozen, *inputs)
    jax.block_until_ready(state)
  return state


def whole(
  loop: Loop, hooks: tuple[Hook, ...], state: TrainState, steps: range, took: list[Took]
) -> TrainState:
  """The loop."""
  jax.block_until_ready(state)
  with timing(took):
    state = follow(loop, hooks, state, steps, StopSignal())
    loop.log.flush()
    jax.block_until_ready(state)
  return state


def measure(width: int, rate: float, steps: int, repeats: int) -> dict[str, Any]:
  """Both ways in turn."""
  run = prepare(config(width, rate))
  with tempfile.TemporaryDirectory() as folder:
    workdir = WorkDir(Path(folder))
    workdir.private.mkdir()
    loop = loop_module._loop(run, workdir, MasterKey.from_os())
    bar = Progress(10_000, 0, run.expected_batch_size, "", stream=io.StringIO())
    hooks: tuple[Hook, ...] = (loop.log, ProgressHook(bar, run))
    state = init_state(run.params, run.optimizer, run.mesh)
    state = bare(loop, state, range(WARM_UP), [])
    state = whole(loop, hooks, state, range(WARM_UP), [])
    calls: list[Took] = []
    totals: list[Took] = []
    for index in range(repeats):
      part = range(WARM_UP + index * steps, WARM_UP + (index + 1) * steps)
      state = bare(loop, state, part, calls)
      state = whole(loop, hooks, state, part, totals)
    bare(loop, state, part, calls)
    loop.log.close()
  beside = [(a.seconds + b.seconds) / 2 for a, b in itertools.pairwise(calls)]
  shares = [100 * (1 - call / total.seconds) for call, total in zip(beside, totals, strict=True)]
  low, middle, high = statistics.quantiles(shares, n=4)
  here, here_bare = (statistics.median(each.here for each in took) for took in (totals, calls))
  return {
    "calls_milliseconds": round(1e3 * statistics.median(beside) / steps, 2),
    "loop_milliseconds": round(1e3 * statistics.median(t.seconds for t in totals) / steps, 2),
    "overhead_percent": round(middle, 2),
    "overhead_percent_quartiles": [round(low, 2), round(high, 2)],
    "main_thread_milliseconds": round(1e3 * (here - here_bare) / steps, 3),
    "steps": steps,
    "repeats": repeats,
    "units_per_step": round(run.expected_batch_size),
    "cores_of_the_device": int(os.environ.get("NPROC", os.cpu_count() or 1)),
  }


def main() -> None:
  """The command line."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--width", type=int, default=56)
  parser.add_argument("--rate", type=float, default=0.2)
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--repeats", type=int, default=24)
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  result = measure(arguments.width, arguments.rate, arguments.steps, arguments.repeats)
  print(json.dumps(result, indent=2))
  if arguments.out:
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  sys.exit(main())
