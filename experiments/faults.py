"""Ends a run in every way that a machine has, and compares what it becomes with an undisturbed run.

    python -m experiments.faults --kills=50 --json --out=experiments/faults.json

SIGKILL at random moments, all over one run; SIGTERM; a newest checkpoint with a changed bit; a disk
that is full for a while. Each time the same command is given again, and the released parameters
must be those of the undisturbed run bit for bit, at the same epsilon, paid once. A fixed test key
makes the runs comparable. The exit code is 1 if anything differs.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARAMS = "release/params.safetensors"
# Of the kills, the share that comes while a process starts, and how many come when all is trained.
STARTING = 0.2
AFTER_THE_LAST_STEP = 3


@dataclasses.dataclass
class Bench:
  """Where runs are started: all with one configuration and one key.

  Attributes:
    folder: for the runs, the key and compiled code (which holds no key: keys are arguments).
    steps: of each run.
    rng: chooses the moments.
  """

  folder: Path
  steps: int
  rng: random.Random

  def start(self, workdir: Path) -> subprocess.Popen[str]:
    """The one command."""
    key = self.folder / "test.key"
    if not key.exists():
      key.touch(mode=0o600)
      key.write_text("0123456789abcdef" * 4)
    overrides = {
      "data.num_records": 200,
      "model.kwargs.widths": "(8,)", "model.kwargs.strides": "(2,)", "model.kwargs.groups": 2,
      "privacy.epsilon": 4.0, "privacy.delta": 1e-3, "privacy.sampling_rate": 0.1,
      # So that a process starts fast: an accountant that answers at once, one engine to compile.
      "privacy.accountant": "rdp", "train.engine": "vmap",
      "train.steps": self.steps, "train.microbatch_size": 32, "train.ema": 0.5,
      "checkpoint.every": 4,
    }  # fmt: skip
    cache = {
      "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PLATFORMS": "cpu",
    }
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    command = [sys.executable, "-m", "dp_jax", "train", "--config=configs/digits.py"]
    return subprocess.Popen(
      [*command, *flags, f"--workdir={workdir}", f"--test_key_file={key}", "--json"],
      cwd=ROOT, env={**os.environ, **cache}, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip

  def complete(self, workdir: Path) -> None:
    """Gives the command and waits for its success."""
    process = self.start(workdir)
    _, err = process.communicate(timeout=600)
    if process.returncode:
      raise RuntimeError(f"the run failed: {err}")

  def until(self, process: subprocess.Popen[str], workdir: Path, steps: int) -> bool:
    """Waits until the run has logged so many steps; False if the process ends before."""
    while process.poll() is None:
      if logged(workdir) >= steps:
        return True
      time.sleep(0.001)
    return False


def logged(workdir: Path) -> int:
  """Steps in the private log."""
  path = workdir / "private" / "training.jsonl"
  return path.read_bytes().count(b"\n") if path.exists() else 0


def outcome(workdir: Path) -> dict[str, Any]:
  """What must be the same."""
  record = json.loads((workdir / "release" / "privacy.json").read_text())
  return {
    "params": (workdir / PARAMS).read_bytes(),
    "epsilon": record["epsilon"],
    "ledger": (workdir / "ledger.jsonl").read_text().count("\n"),
    "steps": sorted({
      json.loads(line)["step"] for line in (workdir / "private" / "training.jsonl").open()
    }),
  }  # fmt: skip


def compared(workdir: Path, expected: dict[str, Any]) -> dict[str, Any]:
  """Which of it is the same."""
  found = outcome(workdir)
  return {
    "parameters_equal": found["params"] == expected["params"],
    "epsilon_equal": found["epsilon"] == expected["epsilon"],
    "budget_paid_once": found["ledger"] == expected["ledger"],
    "every_step_logged_once": found["steps"] == expected["steps"] == list(
      range(1, len(expected["steps"]) + 1)
    ),
  }  # fmt: skip


def killed(bench: Bench, kills: int, expected: dict[str, Any]) -> dict[str, Any]:
  """One run, killed again and again."""
  workdir = bench.folder / "killed"
  phases = {"starting": 0, "training": 0, "after_the_last_step": 0}
  reached: list[int] = []
  while sum(phases.values()) < kills:
    left = kills - sum(phases.values())
    process, before, began = bench.start(workdir), logged(workdir), time.monotonic()
    if left <= AFTER_THE_LAST_STEP and kills > 2 * AFTER_THE_LAST_STEP:
      bench.until(process, workdir, bench.steps)
      time.sleep(bench.rng.uniform(0, 0.5))
    elif bench.rng.random() < STARTING:
      time.sleep(bench.rng.uniform(0, 4))
    else:
      ahead = (bench.steps - before) / (left + 1) * bench.rng.uniform(0, 1.2)
      bench.until(process, workdir, min(before + 1 + int(ahead), bench.steps - 1))
      time.sleep(bench.rng.uniform(0, 0.01))
    process.kill()
    process.communicate()
    if process.returncode == 0:
      break  # the run was over before the last kills
    after = logged(workdir)
    began_training = after != before or after == bench.steps
    phase = "starting" if not began_training else "training"
    phases["after_the_last_step" if after >= bench.steps else phase] += 1
    reached.append(after)
    print(
      f"kill {len(reached)}: {after} steps logged, {time.monotonic() - began:.1f} s",
      file=sys.stderr, flush=True,
    )  # fmt: skip
  bench.complete(workdir)
  return {"kills": sum(phases.values()), **phases, "at": reached, **compared(workdir, expected)}


def terminated_then_damaged(bench: Bench, expected: dict[str, Any]) -> dict[str, Any]:
  """SIGTERM at a random step; then one bit of the newest checkpoint changes."""
  workdir = bench.folder / "terminated"
  process = bench.start(workdir)
  bench.until(process, workdir, bench.rng.randrange(bench.steps // 4, bench.steps // 2))
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=300)
  asked = "the same command goes on from there" in err
  steps = sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
  array = max(
    (p for p in (workdir / "checkpoints" / str(steps[-1]) / "state").rglob("*") if p.is_file()),
    key=lambda p: p.stat().st_size,
  )
  content = bytearray(array.read_bytes())
  content[len(content) // 2] ^= 1
  array.write_bytes(bytes(content))
  process_again = bench.start(workdir)
  _, warned = process_again.communicate(timeout=600)
  return {
    "sigterm_exit_code": process.returncode,
    "says_how_to_go_on": asked,
    "stopped_at": steps[-1],
    "damage_noticed": f"the checkpoint of step {steps[-1]} cannot be read" in warned,
    "exit_code": process_again.returncode,
    **compared(workdir, expected),
  }


def full_disk(bench: Bench, expected: dict[str, Any]) -> dict[str, Any]:
  """The disk fills up at a random step, and has room again later."""
  with _disk(bench.folder) as (way, place, fill, free):
    workdir = place / "run"
    process = bench.start(workdir)
    bench.until(process, workdir, bench.rng.randrange(bench.steps // 4, bench.steps // 2))
    fill(process.pid)
    _, err = process.communicate(timeout=300)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    free()
    bench.complete(workdir)
    return {
      "way": way,
      "exit_code": process.returncode,
      "one_line": len(errors) == 1 and "Traceback" not in err,
      "said": err.replace(str(bench.folder), "")[-1500:].strip(),
      **compared(workdir, expected),
    }


@contextlib.contextmanager
def _disk(
  folder: Path,
) -> Iterator[tuple[str, Path, Callable[[int], None], Callable[[], None]]]:
  """A small disk of its own, or where mounting is not allowed a limit on the size of files."""
  place = folder / "disk"
  place.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
  with contextlib.suppress(OSError):
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
      filler = place / "filler"

      def fill(pid: int) -> None:
        del pid
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
          while True:
            file.write(bytes(4096))

      try:
        yield "a tmpfs of 16 MiB", place, fill, filler.unlink
      finally:
        subprocess.run(["umount", str(place)], check=False)
      return

  def limit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, 1024))

  yield "RLIMIT_FSIZE (mounting a tmpfs is not allowed here)", place, limit, lambda: None


def check(kills: int, steps: int, seed: int, folder: Path, disk: bool = True) -> dict[str, Any]:
  """Runs everything. `ok` in the result says whether nothing differed."""
  bench = Bench(folder, steps, random.Random(seed))
  began = time.monotonic()
  bench.complete(folder / "undisturbed")
  expected = outcome(folder / "undisturbed")
  parts = {
    "sigkill": killed(bench, kills, expected),
    "sigterm_and_damage": terminated_then_damaged(bench, expected),
  }
  if disk:
    parts["full_disk"] = full_disk(bench, expected)
  facts = [value for part in parts.values() for value in part.values() if isinstance(value, bool)]
  codes = [parts["sigterm_and_damage"]["sigterm_exit_code"], *(
    [parts["full_disk"]["exit_code"] - 2] if disk else []
  )]  # fmt: skip
  return {
    "ok": all(facts) and not any(codes),
    "steps": steps,
    "seed": seed,
    "epsilon": expected["epsilon"],
    **parts,
    "seconds": round(time.monotonic() - began),
  }


def main() -> int:
  """The command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument("--kills", type=int, default=50)
  parser.add_argument("--steps", type=int, default=1500)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  parser.add_argument("--out", type=Path, help="write the result to a file as well")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    result = check(arguments.kills, arguments.steps, arguments.seed, Path(folder))
  text = json.dumps(result, indent=None if arguments.json else 2)
  print(text)
  if arguments.out:
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
  return 0 if result["ok"] else 1


if __name__ == "__main__":
  sys.exit(main())
