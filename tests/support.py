"""What several test files share: a run small enough for a few seconds, and its command line."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.config.run_config import Config
from dp_jax.data.records import RecordSpec
from dp_jax.models.build import ModelSpec
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.multilabel import MultiLabel

ROOT = Path(__file__).parents[1]
STEPS = 8


def small_config(**changes: Any) -> Config:
  """A private run on 200 scans with a tiny model; `data__source="npz"` changes data.source."""
  values: dict[str, Any] = {
    "data": {"source": "digits", "declared": "public", "num_records": 200},
    "model": {"kwargs": {"widths": [8], "strides": [2], "groups": 2}},
    "privacy": {"epsilon": 4.0, "delta": 1e-3, "sampling_rate": 0.3},
    "train": {"steps": STEPS, "learning_rate": 0.1, "microbatch_size": 32, "ema": 0.5},
    "task": {},
    "checkpoint": {"every": 2},
    "mesh": "data:1",  # of the eight virtual devices
  }
  for name, value in changes.items():
    section, _, key = name.partition("__")
    if key:
      values[section][key] = value
    else:
      values[section] = value
  return Config.from_dict(values)


def flags_of(config: Config) -> list[str]:
  """The command line that sets every key of a configuration."""
  result = [f"--config={ROOT / 'tests' / 'all_keys.py'}"]
  for section, content in config.to_dict().items():
    for name, value in _flat(section, content):
      if value is not None:
        text = tuple(value) if isinstance(value, list) else value
        result.append(f"--config.{name}={text}")
  return result


def _flat(name: str, content: Any) -> list[tuple[str, Any]]:
  if not isinstance(content, dict):
    return [(name, content)]
  return [pair for key, value in content.items() for pair in _flat(f"{name}.{key}", value)]


def key_file(folder: Path) -> Path:
  """A fixed secret key, for comparing runs."""
  path = folder / "test.key"
  path.write_text("0123456789abcdef" * 4)
  path.chmod(0o600)
  return path


def start(*arguments: str) -> subprocess.Popen:
  """Starts `python -m dp_jax` with these arguments, on one device."""
  return subprocess.Popen(
    [sys.executable, "-m", "dp_jax", *arguments],
    cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def free_port() -> int:
  """A port of this machine that nobody listens on."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return int(found.getsockname()[1])


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
  """Waits for a process: exit code, standard output, standard error."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def lines(path: Path) -> list[dict[str, Any]]:
  """The entries of a JSON-lines file."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def write_npz(
  folder: Path, images: np.ndarray, labels: np.ndarray, *, splits=("train", "test"), **columns
):
  """Writes the same arrays as each split of an npz source."""
  folder.mkdir(parents=True, exist_ok=True)
  for split in splits:
    np.savez(folder / f"{split}.npz", image=images, label=labels, **columns)
  return folder


def without_hashes(text: str, release: Path) -> str:
  """A text without the hash of noised parameters, and without the digest of the record of them."""
  record = json.loads((release / "privacy.json").read_text())
  return text.replace(record["parameters"]["sha256"], "HASH").replace(record["digest"], "DIGEST")


def one_label(
  input_shape: tuple[int, ...], num_classes: int, value_range: tuple[float, float],
  several: bool = False,
) -> RecordSpec:  # fmt: skip
  """What a record of these inputs and one class, or of several labels, looks like."""
  kind = MultiLabel if several else Classification
  return kind(input_shape, num_classes, value_range).record


def classifier(
  name: str, kwargs: dict[str, Any], input_shape: tuple[int, ...], num_classes: int,
  value_range: tuple[float, float], class_names: tuple[str, ...] = (), several: bool = False,
  reading: dict[str, Any] | None = None,
) -> ModelSpec:  # fmt: skip
  """The description of a model for such records."""
  kind = MultiLabel if several else Classification
  task = kind(input_shape, num_classes, value_range, class_names)
  return ModelSpec(name, kwargs, dict(task.facts()), reading or {})
