"""What a run leaves for others: `release/` under the guarantee, or `unprotected/` without one."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dp_jax.files.atomic import write_bytes, write_text
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays
from dp_jax.models.opening import Structure, load_model
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import GUARANTEE
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.statement.manifest import write_manifest
from dp_jax.statement.model_card import model_card
from dp_jax.statement.privacy_json import (
  HYPERPARAMETERS_NOT_RECORDED,
  ReleaseFacts,
  bound,
  privacy_record,
)
from dp_jax.tasks.bound import BoundTask
from dp_jax.tasks.opening import load_task
from dp_jax.tasks.task import Task
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.open_data import model_of_features
from dp_jax.training.setup.prepare import Run
from dp_jax.training.setup.selection import selection_warnings
from dp_jax.training.step import TrainState

PARAMS = "params.safetensors"
RECORD = "privacy.json"


@dataclasses.dataclass(frozen=True)
class Release:
  """A trained model, read back.

  Attributes:
    spec: what rebuilds and feeds the model.
    arrays: its arrays by name.
    privacy: the content of privacy.json; None for a run without privacy.
    task: what it was trained for.
    functional: the structure of the model.
  """

  spec: ModelSpec
  arrays: Arrays
  privacy: dict[str, Any] | None
  task: Task
  functional: Structure

  @property
  def model(self) -> Any:
    """The model with its weights: a Flax NNX module, unless it was given as something else."""
    return self.functional.bind(self.arrays)

  def predict(self, inputs: np.ndarray) -> np.ndarray:
    """What the task predicts of raw inputs [N, ...]: of classes, probabilities [N, num_classes].

    They sum to 1, but for a model of several labels, which are each a question of its own.

    Raises:
      ValueError: if the inputs have another shape than the model's.
    """
    self._bound.check_inputs(inputs)
    return np.asarray(self.predictor()(inputs))

  def predictor(self) -> Callable[[np.ndarray], Any]:
    """The compiled `predict`, for many batches of one shape."""
    compiled = jax.jit(self._bound.predict)
    return lambda inputs: compiled(self.arrays, inputs)

  def evaluator(self) -> Callable[[np.ndarray], Any]:
    """What an evaluation takes, compiled: probabilities, and scores that rank records."""
    compiled = jax.jit(self._bound.evaluated)
    return lambda inputs: compiled(self.arrays, inputs)

  @property
  def _bound(self) -> BoundTask:
    return BoundTask(self.functional, self.task, self.spec)


def load_release(
  path: str | os.PathLike[str], *, model: Any = None, task: Task | None = None,
  trust_code: bool = False,
) -> Release:  # fmt: skip
  """Reads a `release/` or `unprotected/` folder, or the work directory that holds one.

  What the arrays came from stays in the file: weights that you save from them by code of your own
  are weights of which nothing is known. `model.weights` takes the file itself.

  Args:
    path: the folder.
    model: the model, as `dp_jax.train` takes it, where it is none of dp_jax.
    task: the task, where it is none of dp_jax.
    trust_code: import the model and task that the release names, which runs their code.

  Raises:
    ValueError: if there is no such folder or its files do not fit together, or the release names
      code of others that is neither given nor trusted.
  """
  folder = release_folder(Path(path))
  spec, _ = weights.load(folder / PARAMS)
  task = load_task(spec, task, trust_code)
  functional, fresh = load_model(spec, model, trust_code)
  arrays, _ = weights.initialise_from(fresh, folder / PARAMS)
  privacy = folder / RECORD
  record = json.loads(privacy.read_text()) if privacy.is_file() else None
  return Release(spec, arrays, record, task, functional)


def release_folder(path: Path) -> Path:
  """The folder with the parameters: the path itself, or that inside a work directory."""
  inside = [path / name for name in ("release", "unprotected")]
  return next((folder for folder in inside if (folder / PARAMS).is_file()), path)


def run_folder(path: Path) -> Path:
  """The work directory of a release."""
  return release_folder(path).absolute().parent


def write_parameters(
  run: Run, folder: WorkDir, state: TrainState, step: int, test_key: bool, ledger: Ledger
) -> None:
  """Writes parameters and privacy record to `.release.tmp`, or parameters to `unprotected/`.

  `step` is the one whose parameters they are.
  """
  content = functools.partial(
    weights.to_bytes, {**state.average, **run.frozen}, run.task.spec,
    declared=run.config.data.declared, ancestry=run.ancestry,
  )  # fmt: skip
  if run.privacy is None:
    folder.unprotected.mkdir(mode=0o700, exist_ok=True)
    write_bytes(folder.unprotected / PARAMS, content())
    return
  record = privacy_record(_facts(run, run.privacy, step, test_key, ledger))
  guarantee = {name: record[name] for name in GUARANTEE}
  shutil.rmtree(folder.release_begun, ignore_errors=True)
  folder.release_begun.mkdir()
  protected = content(protected=True, test_key=test_key, guarantee=guarantee)
  write_bytes(folder.release_begun / PARAMS, protected)
  _write_record(folder.release_begun, bound(record, hashlib.sha256(protected).hexdigest()))


def complete_release(run: Run, folder: WorkDir) -> dict[str, Any] | None:
  """Adds model card and manifest, and moves `release/` into place, whole or not at all.

  Returns:
    The content of privacy.json, or None without privacy.
  """
  if run.privacy is None:
    return None
  return _into_place(folder, json.loads((folder.release_begun / RECORD).read_text()))


def add_evaluation(
  run: Run, folder: WorkDir, metrics: Mapping[str, float | None]
) -> dict[str, Any] | None:
  """Adds the accuracy on public data to a release that is complete; nothing on private data.

  Args:
    run: what was prepared.
    folder: its work directory.
    metrics: by name, on data.eval_split.

  Returns:
    The content of privacy.json as it is then, or None without privacy.
  """
  if run.privacy is None:
    return None
  record = json.loads((folder.release / RECORD).read_text())
  accuracy = metrics.get("accuracy")
  if run.config.data.declared != "public" or accuracy is None or not math.isfinite(accuracy):
    return record
  evaluation = {"split": run.config.data.eval_split, "accuracy": accuracy}
  shutil.rmtree(folder.release_begun, ignore_errors=True)
  shutil.copytree(folder.release, folder.release_begun)
  return _into_place(folder, bound(record, record["parameters"]["sha256"], evaluation))


def _into_place(folder: WorkDir, record: dict[str, Any]) -> dict[str, Any]:
  """Writes what is derived from the record, and moves the folder that was begun into place."""
  begun = folder.release_begun
  _write_record(begun, record)
  write_text(begun / "model_card.md", model_card(record))
  write_manifest(begun)
  for file in begun.iterdir():
    file.chmod(0o644)
  begun.chmod(0o755)
  shutil.rmtree(folder.release, ignore_errors=True)
  begun.rename(folder.release)
  return record


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
  write_text(folder / RECORD, json.dumps(record, indent=2, sort_keys=True) + "\n")


def _facts(
  run: Run, privacy: PrivacySpec, step: int, test_key: bool, ledger: Ledger
) -> ReleaseFacts:
  config = run.config
  public = run.mechanism.adjacency != "add_or_remove_one"
  trained = sum(x.size for x in run.params.values())
  digest = run.weights_digest
  of_features, _ = model_of_features(run.loader.source)
  own = digest and f"{Path(config.model.weights or '').name} sha256 {digest}"
  return ReleaseFacts(
    spec=privacy,
    mechanism=run.mechanism,
    parts={} if run.solving is None else run.solving.mechanisms,
    ledger_entries=ledger.to_list(),
    num_units=run.loader.num_units if public else None,
    expected_batch_size=run.expected_batch_size,
    max_records_per_unit=config.max_records_per_unit,
    trainable_parameters=trained,
    total_parameters=trained + sum(x.size for x in run.frozen.values()),
    declared=config.data.declared,
    test_key=test_key,
    public_facts={"data": config.data.source, **run.public_facts},
    pretrained_weights="; ".join(each for each in (own, of_features) if each) or None,
    hyperparameter_selection=(
      config.privacy.hyperparameter_selection or HYPERPARAMETERS_NOT_RECORDED
    ),
    warnings=(
      *(() if public else run.warnings),
      *run.weights_warnings,
      *selection_warnings(config, step),
    ),
  )
