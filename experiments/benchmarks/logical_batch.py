"""Memory of one step by the number of its units: that of one microbatch, up to a million.

  python -m experiments.benchmarks.logical_batch --json=experiments/benchmarks/logical_batch.json

Each size is one released step in a process of its own: the units of one microbatch over and over,
so that the host keeps indices alone. Peak memory is that of the process; `device_bytes` the most
that jax held between two microbatches.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

SIZES = (2**12, 2**16, 2**20)
MICROBATCH = 4096


def measure(num_units: int) -> dict[str, float]:
  """Takes one step of so many units; returns what it took."""
  import jax
  import numpy as np

  from dp_jax.config.run_config import Config
  from dp_jax.privacy.master_key import MasterKey
  from dp_jax.training import loop as loop_module
  from dp_jax.training.checkpoints.workdir import WorkDir
  from dp_jax.training.setup.prepare import prepare
  from dp_jax.training.step import init_state

  config = Config.from_dict(
    {
      "data": {"source": "digits", "declared": "public"},
      "model": {"name": "linear"},
      "privacy": {"epsilon": 4.0, "delta": 1e-4, "sampling": "full_batch"},
      "train": {"steps": 1, "microbatch_size": MICROBATCH},
    }
  )
  loop = loop_module._loop(prepare(config), WorkDir(Path("unused")), MasterKey.from_os())
  loader, held = loop.run.loader, [0]

  class Repeated:
    """Every unit is one of those of the data set."""

    def load(self, indices: np.ndarray, size: int):
      held[0] = max(held[0], sum(x.nbytes for x in jax.live_arrays()))
      return loader.load(indices % loader.num_units, size)

  run = dataclasses.replace(loop.run, loader=Repeated())
  sampler = dataclasses.replace(loop.sampler, indices=lambda step: np.arange(num_units))
  loop = dataclasses.replace(loop, run=run, sampler=sampler)
  state = init_state(run.params, run.optimizer, run.mesh)
  start = time.monotonic()
  jax.block_until_ready(loop.step(state, 0))
  return {
    "units": num_units,
    "microbatch_size": MICROBATCH,
    "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    "device_bytes": held[0],
    "seconds": round(time.monotonic() - start, 2),
  }


def main() -> None:
  """Measures all sizes, each in its own process, and writes them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=Path)
  parser.add_argument("--size", type=int, help="of one measurement, in this process")
  options = parser.parse_args()
  if options.size:
    print(json.dumps(measure(options.size)))
    return
  rows = []
  for size in SIZES:
    command = [sys.executable, "-m", "experiments.benchmarks.logical_batch", f"--size={size}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows.append(json.loads(out.splitlines()[-1]))
    print(rows[-1], flush=True)
  if options.json:
    options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
  main()
