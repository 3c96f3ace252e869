"""Compares the ghost engine with per-unit gradients on thousands of random small networks.

The networks are those of the property test. Writes ghost_property.json beside this file.

  python experiments/ghost_property.py --networks=5000 --seed=0 --minutes=10
"""

import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gradients" / "ghost"))

import networks
from test_property import compare_network, problem_of

OUTPUT = Path(__file__).with_suffix(".json")


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--networks", type=int, default=5000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
  return parser.parse_args()


def main() -> None:
  """Runs the comparison and writes its result; exits with 1 if a network differs."""
  args = _arguments()
  rng = np.random.default_rng(args.seed)
  started = time.monotonic()
  failures: list[dict[str, Any]] = []
  largest: dict[str, float] = collections.defaultdict(float)
  counted: dict[str, int] = collections.defaultdict(int)
  for index in range(args.networks):
    if time.monotonic() - started > 60 * args.minutes:
      break
    network = networks.draw(lambda options: options[int(rng.integers(len(options)))])
    kind = "bf16" if network.is_half else "float32"
    counted[kind] += 1
    result = compare_network(network)
    problem = problem_of(network, result)
    if problem is not None:
      failures.append({"network": index, "problem": problem})
    some = result.reference > 1e-3
    ratios = result.norms[some] / result.reference[some] - 1
    for name, value in {
      "norm_above": np.max(ratios, initial=0.0),
      "norm_below": np.max(-ratios, initial=0.0),
      "sum_error": result.sum_error,
    }.items():
      largest[f"{kind}_{name}"] = max(largest[f"{kind}_{name}"], float(value))
  _write(args, counted, largest, failures, time.monotonic() - started)
  if failures:
    sys.exit(1)


def _write(
  args: argparse.Namespace,
  counted: dict[str, int],
  largest: dict[str, float],
  failures: list[dict[str, Any]],
  seconds: float,
) -> None:
  command = f"python experiments/ghost_property.py --networks={args.networks} --seed={args.seed}"
  record = {
    "command": command + ("" if args.minutes == float("inf") else f" --minutes={args.minutes:g}"),
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    "backend": jax.default_backend(),
    "seconds": round(seconds),
    "networks": dict(counted),
    "failures": failures,
    "largest": dict(largest),
  }
  OUTPUT.write_text(json.dumps(record, indent=2) + "\n")
  print(json.dumps(record, indent=2))


if __name__ == "__main__":
  main()
