"""Time that the loop adds to the compiled step: sampling, loading, keys, transfers, logs, progress.

    python -m experiments.benchmarks.loop_overhead --out=experiments/benchmarks/loop_overhead.json

The loop with its hooks, as a run has them, against the same compiled calls on inputs that are ready
on the device, on a model whose step takes about 50 ms. Both run in turn, several times; the medians
are compared. The second figure is the processor time of the main thread outside the compiled calls,
which other work on the machine does not move. Saving checkpoints is left out.
"""

import argparse
import dataclasses
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from dp_jax.gradients.keys import step_key
from dp_jax.privacy.keys import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.config import Config
from dp_jax.training.hooks import Hook, Shown
from dp_jax.training.loop import Loop, follow
from dp_jax.training.mesh import put_key
from dp_jax.training.prepare import prepare
from dp_jax.training.progress import Progress
from dp_jax.training.step import TrainState, init_state
from dp_jax.training.stopping import StopSignal
from dp_jax.training.workdir import WorkDir

WARM_UP = 3


def config(width: int, rate: float) -> Config:
  """One device call a step, of nearly all 1,437 scans times the rate."""
  return Config.from_dict({
    "data": {"source": "digits", "declared": "public"},
    "model": {"widths": [width, 2 * width], "strides": [1, 2]},
    "privacy": {"epsilon": 4.0, "delta": 1e-4, "sampling_rate": rate, "accountant": "rdp"},
    "train": {"steps": 10_000, "ema": 0.9, "microbatch_size": round(1437 * rate * 1.4)},
  })  # fmt: skip


def bare(loop: Loop, state: TrainState, steps: range) -> tuple[float, TrainState]:
  """Seconds of the compiled calls alone, of the same steps."""
  ready = []
  for step in steps:
    (piece,) = loop._microbatches(loop.sampler.indices(step))
    keys = [
      put_key(step_key(loop.key, purpose, step), loop.run.mesh) for purpose in ("unit", "noise")
    ]
    ready.append((*piece, *keys))
  jax.block_until_ready((ready, state))
  began = time.perf_counter()
  for inputs in ready:
    state, _ = loop.functions.whole(state, loop.run.frozen, *inputs)
  jax.block_until_ready(state)
  return time.perf_counter() - began, state


def whole(
  loop: Loop, hooks: tuple[Hook, ...], state: TrainState, steps: range
) -> tuple[float, float, TrainState]:
  """Seconds of the loop, and processor seconds of this thread outside the compiled calls."""
  inside, compiled = [0.0], loop.functions.whole

  def timed(*args: Any) -> Any:
    began = time.thread_time()
    result = compiled(*args)
    inside[0] += time.thread_time() - began
    return result

  loop = dataclasses.replace(loop, functions=loop.functions._replace(whole=timed))
  jax.block_until_ready(state)
  began, began_here = time.perf_counter(), time.thread_time()
  state = follow(loop, hooks, state, steps, StopSignal())
  loop.log.flush()
  jax.block_until_ready(state)
  return time.perf_counter() - began, time.thread_time() - began_here - inside[0], state


def measure(width: int, rate: float, steps: int, repeats: int) -> dict[str, Any]:
  """Both ways in turn."""
  run = prepare(config(width, rate))
  with tempfile.TemporaryDirectory() as folder:
    workdir = WorkDir(Path(folder))
    workdir.private.mkdir()
    loop = loop_module._loop(run, workdir, MasterKey.from_os())
    bar = Progress(10_000, 0, run.expected_batch_size, "", stream=io.StringIO())
    hooks: tuple[Hook, ...] = (loop.log, Shown(bar, run))
    state = init_state(run.params, run.optimizer, run.mesh)
    _, state = bare(loop, state, range(WARM_UP))
    calls, totals, ours = [], [], []
    for index in range(repeats):
      part = range(WARM_UP + index * steps, WARM_UP + (index + 1) * steps)
      seconds, state = bare(loop, state, part)
      calls.append(seconds / steps)
      seconds, here, state = whole(loop, hooks, state, part)
      totals.append(seconds / steps)
      ours.append(here / steps)
  call, total, here = map(statistics.median, (calls, totals, ours))
  return {
    "step_milliseconds": round(1e3 * call, 2),
    "loop_milliseconds": round(1e3 * total, 2),
    "overhead_percent": round(100 * (total / call - 1), 2),
    "main_thread_milliseconds": round(1e3 * here, 3),
    "main_thread_percent_of_50_ms": round(100 * here / 50e-3, 2),
    "steps": steps,
    "repeats": repeats,
    "units_per_step": round(run.expected_batch_size),
  }


def main() -> None:
  """The command line."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--width", type=int, default=16)
  parser.add_argument("--rate", type=float, default=0.1)
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  result = measure(arguments.width, arguments.rate, arguments.steps, arguments.repeats)
  print(json.dumps(result, indent=2))
  if arguments.out:
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  sys.exit(main())
