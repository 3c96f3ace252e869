"""Made-up runs, small and complete: records through the real privacy layer, metrics by hand."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from dp_jax import privacy
from dp_jax.privacy.ledger import Ledger
from dp_jax.statement import (
  evaluation_points,
  manifest,
  model_card,
  privacy_json,
  sentences,
  statement_items,
)

NUM_UNITS = 1437
CLASS_NAMES = ("zero", "one", "two")


_COMMON: dict[str, Any] = {
  "max_records_per_unit": 2,
  "trainable_parameters": 30,
  "total_parameters": 42,
  "declared": "public",
  "public_facts": {
    "input_shape": [8, 8, 1],
    "class_names": list(CLASS_NAMES),
    "value_range": [0.0, 16.0],
    "num_classes": 3,
    "multilabel": False,
  },
  "pretrained_weights": "rendered digits, sha256 " + "ab" * 32,
}


@functools.cache
def _calibrate(
  spec: privacy.PrivacySpec, sampling: privacy.Scheme, steps: int
) -> privacy.Mechanism:
  return privacy.calibrate(spec, sampling, steps=steps, clip_norm=1.5)


def make_facts(**changes: Any) -> privacy_json.ReleaseFacts:
  """Facts of a calibrated run; full batch by default, whose accounting takes no time."""
  sampling = changes.pop("sampling", privacy.FullBatch())
  spec = changes.pop("spec", privacy.PrivacySpec(epsilon=1.0, delta=1e-5, unit="scan"))
  num_units = changes.pop("num_units", NUM_UNITS)
  steps = changes.pop("steps", 20)
  if "mechanism" in changes:
    return privacy_json.ReleaseFacts(**(_COMMON | {"spec": spec, "num_units": num_units} | changes))
  mechanism = _calibrate(spec, sampling, steps)
  ledger = Ledger()
  ledger.reserve(mechanism, "training", unit=spec.unit)
  arguments: dict[str, Any] = {
    "spec": spec,
    "mechanism": mechanism,
    "ledger_entries": ledger.to_list(),
    "num_units": num_units,
    "expected_batch_size": mechanism.expected_batch_size(num_units),
  }
  return privacy_json.ReleaseFacts(**(_COMMON | arguments | changes))


@dataclasses.dataclass(frozen=True)
class RowRun:
  """A run of one row of the table, small enough that accounting it takes no time."""

  sampling: privacy.Scheme
  adjacency: str
  noise_multiplier: float
  steps: int


ROW_RUNS = {
  "full_batch": RowRun(privacy.FullBatch(), "zero_out", 8.0, 3),
  "poisson": RowRun(privacy.Poisson(0.25), "zero_out", 4.0, 3),
  "poisson replaced": RowRun(privacy.Poisson(0.25), "replace_one", 8.0, 3),
  "poisson unbounded": RowRun(privacy.Poisson(0.25), "add_or_remove_one", 4.0, 3),
  "truncated_poisson": RowRun(privacy.TruncatedPoisson(0.25, 600, NUM_UNITS), "zero_out", 8.0, 3),
  "fixed_size": RowRun(privacy.FixedSize(60, NUM_UNITS), "replace_one", 6.0, 3),
  "stream": RowRun(privacy.Stream(100, NUM_UNITS), "zero_out", 4.0, 30),
  "stream replaced": RowRun(privacy.Stream(100, NUM_UNITS), "replace_one", 9.0, 30),
  "full_batch replaced": RowRun(privacy.FullBatch(), "replace_one", 16.0, 3),
  "full_batch unbounded": RowRun(privacy.FullBatch(), "add_or_remove_one", 8.0, 3),
}


@functools.cache
def row_record_text(name: str) -> str:
  """The privacy record of a row's run, as JSON: the target is what the noise happens to give."""
  run = ROW_RUNS[name]
  unbounded = run.adjacency == "add_or_remove_one"
  mechanism = privacy.Mechanism(
    run.sampling, run.noise_multiplier, run.steps, 1.5, run.adjacency,
    declared_batch_size=360.0 if unbounded else None,
  )  # fmt: skip
  spec = privacy.PrivacySpec(mechanism.epsilon(1e-5), 1e-5, "scan", run.adjacency)
  ledger = Ledger()
  ledger.reserve(mechanism, "training", unit="scan")
  facts = make_facts(
    spec=spec,
    mechanism=mechanism,
    ledger_entries=ledger.to_list(),
    num_units=None if unbounded else NUM_UNITS,
    expected_batch_size=mechanism.expected_batch_size(NUM_UNITS),
  )
  return json.dumps(bound(privacy_json.privacy_record(facts)))


def row_record(name: str) -> dict[str, Any]:
  """A fresh copy of the privacy record of a row's run."""
  return json.loads(row_record_text(name))


def fit_texts(record: dict[str, Any]) -> dict[str, Any]:
  """The record with its texts written anew from its other fields, as a forger would."""
  record["statement"] = sentences.statement(record)
  record["statement_long"] = statement_items.statement_long(record)
  record["nist_sp_800_226"] = evaluation_points.evaluation_points(record)
  return record


def parameters(record: Mapping[str, Any], **changes: Any) -> bytes:
  """A file of 42 parameters whose header says what the record does, but for the changes."""
  arrays = {"kernel": np.zeros((10, 4), np.float32), "bias": np.zeros(2, np.float32)}
  names = ("input_shape", "num_classes", "value_range", "class_names", "multilabel")
  public = record["treated_as_public"]
  model = {name: public[name] for name in names if name in public}
  about = {
    "model": json.dumps({"name": "linear", "sizes": {}, **model}),
    "protected": True,
    "declared": record["declared"],
    "guarantee": {name: record[name] for name in ("epsilon", "delta", "unit", "adjacency")},
    "ancestry": [],
  }
  if record["randomness"]["test_key"]:
    about["test_key"] = True
  about = {name: value for name, value in {**about, **changes}.items() if value is not None}
  return save(arrays, {"dp_jax": json.dumps(about)})


def bound(record: Mapping[str, Any], evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """The record of those parameters."""
  digest = hashlib.sha256(parameters(record)).hexdigest()
  return privacy_json.bound(record, digest, evaluation)


def write_release(folder: Path, record: Mapping[str, Any]) -> None:
  """A release folder with 42 parameters around `record`, which is bound to them if it is not."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "params.safetensors").write_bytes(parameters(record))
  if record["parameters"]["sha256"] == privacy_json.UNBOUND:
    record = bound(record)
  (folder / "privacy.json").write_text(json.dumps(record), encoding="utf-8")
  card = model_card.model_card(record)
  (folder / "model_card.md").write_text(card, encoding="utf-8")
  manifest.write_manifest(folder)


def write_run(
  folder: Path,
  record: Mapping[str, Any] | None,
  *,
  declared: str = "public",
  accuracy: float = 0.9,
  source: str = "digits",
) -> Path:
  """A work directory with config, metrics and, where there is a record, a release."""
  folder.mkdir(parents=True, exist_ok=True)
  config = {
    "data": {"source": source, "declared": declared, "max_records_per_unit": 2},
    "model": {"name": "convnet", "weights": "/a/machine/path/public.safetensors"},
    "privacy": {"enabled": record is not None, "sampling": "full_batch", "clip_norm": 1.5},
    "train": {"steps": 20, "optimizer": "sgd", "learning_rate": 0.1},
  }
  (folder / "config.json").write_text(json.dumps({"config": config}), encoding="utf-8")
  lines = [
    {"step": step, "split": "test", "metrics": {"accuracy": accuracy * step / 20, "loss": 1.0}}
    for step in (5, 10, 15)
  ]
  lines.append({"step": 20, "split": "test", "final": True, "metrics": final_metrics(accuracy)})
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text + '{"step": 20, "spl', encoding="utf-8")
  if record is not None:
    write_release(folder / "release", record)
  return folder


def final_metrics(accuracy: float) -> dict[str, Any]:
  """The final metrics of 3 classes with 100 held-out records each."""
  hits = round(100 * accuracy)
  confusion = [[hits if i == j else (100 - hits) // 2 for j in range(3)] for i in range(3)]
  confusion[0][1] += (100 - hits) % 2
  return {
    "accuracy": accuracy,
    "loss": 0.31,
    "num_records": 300,
    "confusion": confusion,
    "per_class_accuracy": [hits / 100] * 3,
    "calibration": {
      "confidence": [0.4, 0.7, 0.95],
      "accuracy": [0.35, 0.71, float("nan")],
      "count": [40, 60, 0],
    },
  }
