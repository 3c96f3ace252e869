"""Random settings of every row of the table: does each call answer within 20 s and 2 GB?

    python experiments/benchmarks/accounting_stress.py [settings] [seed]

Draws settings far beyond what anyone would train with (noise multiplier 0.01 to 1000, rate 1e-6 to
1, 1 to 10^6 steps, delta 1e-18 to 0.5). Each call runs in a process of its own under limits of time
and memory. Prints every call that breaks one, then the slowest and the largest, and writes a
summary with the machine and the date to accounting_stress.json beside this file. 300 settings take
about ten minutes on one core.
"""

import datetime
import json
import math
import multiprocessing
import os
import pathlib
import resource
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import accounting as benchmark
import numpy as np

from dp_jax.privacy import (
  FixedSize,
  FullBatch,
  Mechanism,
  Poisson,
  PrivacySpec,
  Scheme,
  Stream,
  TruncatedPoisson,
  calibrate,
  calibrate_rate,
  calibrate_steps,
  group_privacy,
  tuning,
)
from dp_jax.privacy.accounting import composition, profile
from dp_jax.privacy.sampling.scheme import Row
from dp_jax.statement import crosscheck

SECONDS, BYTES = 20.0, 2 * 10**9
# A call is let run this far past the limits, so that the table can say by how much it broke them.
GRACE = 3
SLOWEST = 10
HERE = pathlib.Path(__file__).resolve()


def draw(random: np.random.Generator, row: Row) -> tuple[Mechanism, float]:
  """A mechanism of a row, and a delta; spread evenly over orders of magnitude."""
  noise, delta = 10 ** random.uniform(-2, 3), 10 ** random.uniform(-18, math.log10(0.5))
  steps, rate = round(10 ** random.uniform(0, 6)), 10 ** random.uniform(-6, 0)
  num_units = round(10 ** random.uniform(2, 7))
  size = max(1, round(rate * num_units))
  schemes: dict[str, Scheme] = {
    "full_batch": FullBatch(),
    "poisson": Poisson(rate),
    "fixed_size": FixedSize(size, num_units),
    "stream": Stream(size, num_units),
  }
  if row.scheme == "truncated_poisson":
    cap = size + round(random.uniform(0, 12) * math.sqrt(size)) + 1
    schemes[row.scheme] = TruncatedPoisson(rate, min(num_units, cap), num_units)
  return Mechanism(schemes[row.scheme], noise, steps, 1.0, row.adjacency), delta


def calls(random: np.random.Generator, mechanism: Mechanism, delta: float) -> list[tuple[str, Any]]:
  """What is asked of a mechanism: its epsilon by each accountant, and one more thing."""
  row = mechanism.row
  found: list[tuple[str, Any]] = [
    (f"account {name}", lambda name=name: _epsilon(mechanism, name, delta))
    for name in row.accountants
  ]
  size = int(random.integers(2, 65))
  other = Mechanism(FullBatch(), 10 ** random.uniform(-1, 2), 7, 1.0, row.adjacency)
  target = 10 ** random.uniform(-2, 2)
  spec = PrivacySpec(target, delta, adjacency=row.adjacency)
  scheme, noise, steps = mechanism.sampling, mechanism.noise_multiplier, mechanism.steps
  more = [
    ("group", lambda: group_privacy.account_group(mechanism, size, delta).epsilon),
    ("profile", lambda: profile.privacy_profile(mechanism, delta)[-1][0]),
    ("cross check", lambda: _bracketed(mechanism, delta)),
    (
      "compose",
      lambda: (
        composition.account_releases(
          [composition.Release(mechanism), composition.Release(other)], delta
        ).epsilon
      ),
    ),
    ("calibrate", lambda: calibrate(spec, scheme, steps).epsilon(delta)),
    ("calibrate steps", lambda: calibrate_steps(spec, scheme, noise).epsilon(delta)),
  ]
  if "rdp" in row.accountants:
    selection = tuning.Selection(10 ** random.uniform(0, 3), float(random.choice([0.0, 1.0, 3.0])))
    more.append(("select", lambda: tuning.account_selection(mechanism, selection, delta).epsilon))
  if row.scheme == "poisson":
    more.append(("calibrate rate", lambda: calibrate_rate(spec, steps, noise).epsilon(delta)))
  return [*found, more[int(random.integers(len(more)))]]


def _epsilon(mechanism: Mechanism, accountant: str, delta: float) -> float:
  again = Mechanism(
    mechanism.sampling, mechanism.noise_multiplier, mechanism.steps, 1.0, mechanism.adjacency,
    accountant,
  )  # fmt: skip
  return again.account(delta, sampler_tails=False).epsilon


def _bracketed(mechanism: Mechanism, delta: float) -> float:
  """The stated epsilon, if it is not below a lower bound by other means."""
  stated = mechanism.account(delta, sampler_tails=False).epsilon
  low = crosscheck.cross_check(mechanism, delta)["optimistic_pld_epsilon"]
  if low is not None and stated < low * (1 - 1e-6) - 1e-6:
    raise ArithmeticError(f"epsilon {stated} is below the lower bound {low}")
  return stated


def run(call: Any) -> dict[str, Any]:
  """Runs a call in a process of its own; a ValueError is an answer too."""
  ours, theirs = multiprocessing.Pipe(duplex=False)
  process = multiprocessing.get_context("fork").Process(target=_child, args=(call, theirs))
  start = time.perf_counter()
  process.start()
  theirs.close()
  answered = ours.poll(GRACE * SECONDS)
  try:
    result = ours.recv() if answered else {"failure": "no answer"}
  except EOFError:
    result = {"failure": "died"}
  process.kill()
  process.join()
  return {"seconds": time.perf_counter() - start, **result}


def _child(call: Any, pipe: Connection) -> None:
  resource.setrlimit(resource.RLIMIT_AS, (GRACE * BYTES, GRACE * BYTES))
  start = time.perf_counter()
  try:
    epsilon = float(call())
    result: dict[str, Any] = {"epsilon": epsilon}
    if not epsilon >= 0:
      result["failure"] = f"epsilon is {epsilon}"
  except ValueError as error:
    result = {"refused": f"{type(error).__name__}: {error}"[:200]}
  except BaseException as error:
    result = {"failure": f"{type(error).__name__}: {error}"[:200]}
  result["seconds"] = time.perf_counter() - start
  result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
  pipe.send(result)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """What came of all calls: how many, the worst, and what broke a limit."""
  return {
    "calls": len(rows),
    "finite": sum(math.isfinite(row.get("epsilon", math.nan)) for row in rows),
    "infinite": sum(math.isinf(row.get("epsilon", math.nan)) for row in rows),
    "refused": sum("refused" in row for row in rows),
    "broken": [row for row in rows if broken(row)],
    "slowest": sorted(rows, key=lambda row: -row["seconds"])[:SLOWEST],
    "largest": sorted(rows, key=lambda row: -row.get("peak_mb", 0.0))[:SLOWEST],
  }


def broken(row: dict[str, Any]) -> bool:
  """Whether a call failed or was over a limit."""
  return "failure" in row or row["seconds"] > SECONDS or 1e6 * row["peak_mb"] > BYTES


def main() -> None:
  """Runs everything, and writes the summary."""
  settings = int(sys.argv[1]) if len(sys.argv) > 1 else 300
  seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
  random = np.random.default_rng(seed)
  rows: list[dict[str, Any]] = []
  for number in range(settings):
    mechanism, delta = draw(random, rows()[number % len(rows())])
    for name, call in calls(random, mechanism, delta):
      about = {"call": name, "delta": delta, "mechanism": mechanism.to_dict()}
      rows.append({"setting": number, **about, **run(call)})
      if broken(rows[-1]):
        print(json.dumps(rows[-1]), flush=True)
  found = summary(rows)
  for which in ("slowest", "largest"):
    for row in found[which]:
      print(which, f"{row['seconds']:.2f} s {row.get('peak_mb', 0):.0f} MB", row["call"],
            json.dumps(row["mechanism"]["sampling"]), row["mechanism"]["noise_multiplier"],
            row["mechanism"]["steps"], row["delta"])  # fmt: skip
  about = {
    "command": f"python experiments/benchmarks/accounting_stress.py {settings} {seed}",
    "date": datetime.date.today().isoformat(),
    "machine": f"{os.cpu_count()} cores, {benchmark.processor()}",
    "limits": {"seconds": SECONDS, "bytes": BYTES},
  }
  HERE.with_suffix(".json").write_text(json.dumps({**about, **found}, indent=1) + "\n")
  print(
    {key: found[key] for key in ("calls", "finite", "infinite", "refused")}, len(found["broken"])
  )


if __name__ == "__main__":
  main()
