"""Time, memory and epsilon of accounting, against dp-accounting called plainly.

    python experiments/benchmarks/accounting.py

Each call runs in a process of its own, under limits of time and memory. Prints a table and
writes it, with the machine and the date, to accounting.json beside this file. Takes about
five minutes, most of it waiting for plain calls that do not end.
"""

import datetime
import json
import math
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from typing import Any

SECONDS = 60
BYTES = 6 * 2**30
HERE = pathlib.Path(__file__).resolve()

# name: sampling, noise multiplier, steps, delta, adjacency.
SETTINGS: dict[str, tuple[dict[str, Any], float, int, float, str]] = {
  "poisson .01, noise 1, 1000 steps": (
    {"name": "poisson", "rate": 0.01}, 1.0, 1000, 1e-5, "zero_out"),
  "poisson 256/60000, noise 1.1, 14063 steps": (
    {"name": "poisson", "rate": 256 / 60000}, 1.1, 14063, 1e-5, "zero_out"),
  "poisson .000799, noise .2661, 12511 steps": (
    {"name": "poisson", "rate": 0.0007992712893791364}, 0.26608823503490747, 12511, 1e-6,
    "zero_out"),
  "poisson .0128, noise 2.362, 71589 steps": (
    {"name": "poisson", "rate": 0.012788340630066182}, 2.3618099798750958, 71589, 8e-7,
    "zero_out"),
  "poisson .01, noise .01, 10 steps": (
    {"name": "poisson", "rate": 0.01}, 0.01, 10, 1e-5, "zero_out"),
  "poisson .0001, noise 10, 10^6 steps": (
    {"name": "poisson", "rate": 1e-4}, 10.0, 10**6, 1e-5, "zero_out"),
  "poisson .01, noise 57, 1000 steps, delta 1e-18": (
    {"name": "poisson", "rate": 0.01}, 57.0, 1000, 1e-18, "zero_out"),
  "poisson .01, noise 1, 1000 steps, replace one": (
    {"name": "poisson", "rate": 0.01}, 1.0, 1000, 1e-5, "replace_one"),
  "truncated to 700 of 60000": (
    {"name": "truncated_poisson", "rate": 0.01, "cap": 700, "num_units": 60000}, 1.0, 1000, 1e-5,
    "zero_out"),
  "600 of 60000, noise 2, 1000 steps": (
    {"name": "fixed_size", "expected_batch_size": 600, "num_units": 60000}, 2.0, 1000, 1e-5,
    "replace_one"),
  "full batch, noise 3.7306, 1 step": ({"name": "full_batch"}, 3.7306, 1, 1e-5, "zero_out"),
  "full batch, noise .05, 100 steps": ({"name": "full_batch"}, 0.05, 100, 1e-5, "zero_out"),
}  # fmt: skip


def ours(setting: str, accountant: str) -> dict[str, Any]:
  """One call of this library."""
  from dp_jax.privacy import Mechanism, sampling_from_dict

  sampling, noise_multiplier, steps, delta, adjacency = SETTINGS[setting]
  mechanism = Mechanism(
    sampling_from_dict(sampling), noise_multiplier, steps, 1.0, adjacency, accountant
  )
  start = time.perf_counter()
  found = mechanism.account(delta, sampler_tails=False)
  seconds = time.perf_counter() - start
  return {"epsilon": found.epsilon, "seconds": seconds, "used": found.accountant,
          "reason": found.reason}  # fmt: skip


def plain(setting: str, accountant: str) -> dict[str, Any]:
  """The same event given to dp-accounting's accountant as it is."""
  import dp_accounting
  from dp_accounting import pld, rdp

  from dp_jax.privacy import Mechanism, sampling_from_dict

  sampling, noise_multiplier, steps, delta, adjacency = SETTINGS[setting]
  mechanism = Mechanism(
    sampling_from_dict(sampling), noise_multiplier, steps, 1.0, adjacency, accountant
  )
  event, relation = mechanism.event(), mechanism.row.relation
  start = time.perf_counter()
  if accountant == "analytic_gaussian":
    noise = event.event.noise_multiplier / math.sqrt(event.count)
    epsilon = dp_accounting.get_epsilon_gaussian(noise, delta)
  elif accountant == "pld":
    epsilon = pld.PLDAccountant(relation).compose(event).get_epsilon(delta)
  else:
    epsilon = rdp.RdpAccountant(None, relation).compose(event).get_epsilon(delta)
  return {"epsilon": float(epsilon), "seconds": time.perf_counter() - start, "used": accountant}


def calibration(setting: str, accountant: str) -> dict[str, Any]:
  """Finds the noise for the epsilon that the setting has, rounded to two digits."""
  from dp_jax.privacy import Mechanism, PrivacySpec, calibrate, sampling_from_dict

  sampling, noise_multiplier, steps, delta, adjacency = SETTINGS[setting]
  scheme = sampling_from_dict(sampling)
  there = Mechanism(scheme, noise_multiplier, steps, 1.0, adjacency, accountant).epsilon(delta)
  spec = PrivacySpec(float(f"{there:.2g}"), delta, adjacency=adjacency, accountant=accountant)
  start = time.perf_counter()
  found = calibrate(spec, scheme, steps)
  seconds = time.perf_counter() - start
  return {"epsilon": found.epsilon(delta), "seconds": seconds, "used": accountant,
          "noise_multiplier": found.noise_multiplier}  # fmt: skip


def child(kind: str, setting: str, accountant: str) -> None:
  """Runs one call and prints its result with the peak of this process's memory."""
  resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
  result = {"ours": ours, "plain": plain, "calibrate": calibration}[kind](setting, accountant)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  print(json.dumps({**result, "peak_mib": peak}))


def run(kind: str, setting: str, accountant: str) -> dict[str, Any]:
  """Runs one call in a process of its own; "failure" says what became of it otherwise."""
  command = [sys.executable, str(HERE), kind, setting, accountant]
  key = {"kind": kind, "setting": setting, "accountant": accountant}
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
  except subprocess.TimeoutExpired:
    return {**key, "failure": f"no answer in {SECONDS} s"}
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["killed"])[-1]
    return {**key, "failure": last[:80]}
  return {**key, **json.loads(done.stdout)}


def show(row: dict[str, Any]) -> None:
  """Prints a line of the table."""
  left = f"| {row['setting']} | {row['kind']} | {row['accountant']}"
  if "failure" in row:
    print(f"{left} | {row['failure']} | | |", flush=True)
    return
  used = "" if row["used"] == row["accountant"] else f" ({row['used']})"
  print(
    f"{left}{used} | {row['seconds']:.2f} | {row['peak_mib']:.0f} | {row['epsilon']:.6g} |",
    flush=True,
  )


def main() -> None:
  """Runs everything, and writes the results."""
  from dp_jax.privacy import sampling_from_dict
  from dp_jax.privacy.sampling.schemes import find_row

  rows = []
  print("| setting | call | accountant | seconds | peak MiB | epsilon |")
  print("| --- | --- | --- | --- | --- | --- |")
  for setting, (sampling, _, _, _, adjacency) in SETTINGS.items():
    accountants = find_row(sampling_from_dict(sampling), adjacency).accountants
    for accountant in accountants:
      for kind in ("ours", "plain"):
        rows.append(run(kind, setting, accountant))
        show(rows[-1])
  for setting in list(SETTINGS)[:2]:
    rows.append(run("calibrate", setting, "pld"))
    show(rows[-1])
  about = {
    "command": "python experiments/benchmarks/accounting.py",
    "date": datetime.date.today().isoformat(),
    "machine": f"{os.cpu_count()} cores, {processor()}",
    "python": platform.python_version(),
    "limits": {"seconds": SECONDS, "bytes": BYTES},
  }
  HERE.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def processor() -> str:
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.machine()


if __name__ == "__main__":
  if len(sys.argv) == 4:
    child(*sys.argv[1:])
  else:
    main()
