"""Work directories as `compare` reads them, without training."""

import dataclasses
import json

import numpy as np

from dp_jax.evaluation.predictions import PredictionTable

PEOPLE = 400


def people_table(accuracy, *, step=20, data_digest="d") -> PredictionTable:
  """Two records of each of 400 people, three classes, right with this probability."""
  rng = np.random.default_rng(0)
  count = 2 * PEOPLE
  units, label = np.arange(count) // 2, rng.integers(0, 3, count)
  right = rng.random(count) < accuracy
  about = {"split": "test", "data_digest": data_digest, "unit": "patient", "step": step}
  return PredictionTable.of_labels(
    record=np.arange(count), unit=units, label=label.astype(np.int32),
    predicted=np.where(right, label, (label + 1) % 3).astype(np.int32),
    label_probability=np.where(right, 0.8, 0.1).astype(np.float32), score=np.zeros(0, np.float32),
    groups={
      "sex": np.array(["f", "m"])[units % 2],
      "age": np.array(["below 40", "40 and above"])[units // 2 % 2],
    },
    about=about,
  )  # fmt: skip


def work_directory(folder, table, declared, epsilon=None):
  """A completed run with these predictions; without privacy where epsilon is None."""
  private = folder / "private"
  private.mkdir(parents=True, mode=0o700)
  config = {"data": {"source": "npz", "declared": declared}}
  (folder / "config.json").write_text(json.dumps({"config": config}))
  if epsilon is not None:
    (folder / "release").mkdir()
    (folder / "release" / "privacy.json").write_text(json.dumps({"epsilon": epsilon}))
  path = (folder if declared == "public" else private) / "predictions.npz"
  path.write_bytes(dataclasses.replace(table).to_bytes())
  path.chmod(0o600)
  for kept in private.iterdir():
    kept.chmod(0o600)
  return folder
