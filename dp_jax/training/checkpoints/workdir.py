"""The folder of a run: who may read what, and whose run it is."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files.atomic import write_text
from dp_jax.files.folder_lock import held
from dp_jax.parallel.hosts import is_process_0


class WorkDir:
  """Paths of a run's folder.

  Everything under `private/`, `checkpoints/` and `unprotected/` is readable by the owner alone.
  What the guarantee covers is in `release/`.
  """

  def __init__(self, path: Path):
    self.path = path
    self.config = path / "config.json"
    self.ledger = path / "ledger.jsonl"
    self.private = path / "private"
    self.checkpoints = path / "checkpoints"
    self.release = path / "release"
    self.release_begun = path / ".release.tmp"
    self.unprotected = path / "unprotected"
    self.result = self.private / "result.json"
    self.ledger_identity = self.private / "ledger_identity.json"

  def training_log(self, host: int = 0) -> Path:
    """Where a host writes what the steps saw of its share of the units."""
    return self.private / (f"training-host{host}.jsonl" if host else "training.jsonl")

  def training_logs(self) -> list[Path]:
    """Those of all hosts that have written."""
    return sorted(self.private.glob("training*.jsonl"))

  def predictions(self, declared: str) -> Path:
    """Where predictions on the evaluation split are kept, for groups and comparisons."""
    return (self.path if declared == "public" else self.private) / "predictions.npz"

  def kept_predictions(self, step: int) -> Path:
    """Predictions of a step of a run without privacy; they hold what the records say of people."""
    return self.private / f"step_{step}_predictions.npz"

  def metrics_log(self, declared: str) -> Path:
    """Where evaluations are written: beside the report only if the data is declared public."""
    return (self.path if declared == "public" else self.private) / "metrics.jsonl"

  def tensorboard(self, declared: str) -> Path:
    """Where event files are written: training losses among them, so `private/` on private data."""
    return (self.path if declared == "public" else self.private) / "tensorboard"

  @contextlib.contextmanager
  def open(self, config: Mapping[str, Any]) -> Iterator[None]:
    """Holds the folder for one process, creating it for a run of this configuration.

    Args:
      config: the resolved configuration, as `Config.to_dict` gives it.

    Raises:
      ValueError: if the folder cannot be written, belongs to another run (each difference is
        named), or is held by another process. Nothing in it has been changed then.
    """
    with held(self.path, name="workdir", doing="training in"):
      self._claim(config)
      with owner_only():
        for folder in (self.private, self.checkpoints):
          folder.mkdir(exist_ok=True)
          folder.chmod(0o700)
        yield

  def _claim(self, config: Mapping[str, Any]) -> None:
    if not self.config.exists():
      # Hidden files: the lock, and what a process left that was killed while it wrote the config.
      others = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
      if others:
        raise UserError(
          f"workdir {str(self.path)!r} is not empty ({', '.join(others[:3])}) and holds no run."
          " Choose a new folder."
        )
      write_text(self.config, json.dumps({"config": config}, indent=2) + "\n")
      return
    try:
      there = json.loads(self.config.read_text())["config"]
    except (ValueError, KeyError) as error:
      raise UserError(f"{str(self.config)!r} is not the configuration of a run.") from error
    differences = compare(there, config)
    if differences:
      raise UserError(
        f"workdir {str(self.path)!r} belongs to another run: {'; '.join(differences)}. Choose a"
        " new folder, or use the same configuration to go on with that run."
      )


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
  """What is written is for the owner alone.

  Checkpoints are written by threads of orbax; only the process's umask reaches them.
  """
  previous = os.umask(0o077)
  try:
    yield
  finally:
    os.umask(previous)


# Changing these changes neither the mechanism nor the model that a run ends with.
# (Weights are compared by their hash; another mesh has keys of its own.)
FREE_KEYS = (
  "checkpoint.every",
  "checkpoint.keep",
  "eval",
  "mesh",
  "model.weights",
  "data.workers",
  "data.prefetch",
  "data.check",
  "train.tensorboard",
)


# Their values depend on private records.
SECRET_KEYS = {"data_digest": "the records differ"}


def compare(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
  """Differences of two nested dictionaries, spelled out: "train.steps was 80, is 90"."""
  differences = []
  for key in sorted({*there, *here}):
    name = f"{prefix}{key}"
    if name in FREE_KEYS:
      continue
    old, new = there.get(key), here.get(key)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
      differences += compare(old, new, f"{name}.")
    elif old != new and name in SECRET_KEYS:
      differences.append(SECRET_KEYS[name])
    elif old != new:
      differences.append(f"{name} was {old!r}, is {new!r}")
  return differences


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
  """Appends one JSON line; process 0 only."""
  if not is_process_0():
    return
  with open(path, "a") as file:
    file.write(json.dumps(entry) + "\n")


def cut_log(path: Path, last_step: int) -> None:
  """Before a resume, drops lines of later steps, final ones, and a half-written last line."""
  if not path.exists():
    return
  kept = []
  for line in path.read_text().splitlines():
    try:
      entry = json.loads(line)
    except ValueError:
      continue
    if entry["step"] <= last_step and not entry.get("final"):
      kept.append(line + "\n")
  write_text(path, "".join(kept))
