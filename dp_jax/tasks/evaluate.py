"""Evaluation of a model on a split: one table of predictions, and the metrics of its task."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dp_jax.data.pipeline import in_order
from dp_jax.data.units import UnitLoader
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.tasks.task import Task

# (inputs [n, ...]) -> what the task's `rows` take, [n, ...]
Predict = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """What is known of a model on a split.

  Attributes:
    task: says what its metrics are.
    table: of its records.
  """

  task: Task
  table: PredictionTable

  def scalars(self) -> dict[str, float | None]:
    """Metrics by name."""
    return self.task.scalars(self.table)

  def details(self) -> dict[str, Any]:
    """The scalars, and what tables and plots need."""
    return self.task.details(self.table)


def evaluate(predict: Predict, loader: UnitLoader, task: Task, microbatch_size: int) -> HeldOut:
  """Evaluates a model on every record of a loader, each exactly once.

  Args:
    predict: as the task's `evaluated`; always called with `microbatch_size` units.
    loader: of the split.
    task: of the model.
    microbatch_size: units per call; the last call is padded and masked.
  """
  records, parts = [np.zeros(0, np.int64)], []
  for indices, outputs, units, mask in predictions(predict, loader, microbatch_size):
    real = (units["record_mask"] & mask[:, None]).reshape(-1)
    members = np.full(units["record_mask"].shape, -1)
    members[: len(indices)] = loader.members[indices]
    records.append(members.reshape(-1)[real])
    parts.append(task.rows(outputs[real], _of_records(units, task, real)))
  if not parts:  # a split without records has columns all the same
    units, _ = loader.load(np.zeros(0, np.int64), microbatch_size)
    none = np.zeros(len(units["record_mask"].reshape(-1)), bool)
    outputs = np.asarray(predict(_flat(units["inputs"])))
    parts.append(task.rows(outputs[none], _of_records(units, task, none)))
  record = np.concatenate(records)
  columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
  return HeldOut(task, PredictionTable(record, record, columns))


def predictions(
  predict: Predict, loader: UnitLoader, microbatch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray]]:
  """Yields (indices int64[n], what `predict` gives [size * K, ...], units, mask bool[size])."""
  for indices, units, mask in in_order(loader, microbatch_size):
    yield indices, np.asarray(predict(_flat(units["inputs"]))), units, mask


def _of_records(
  units: dict[str, np.ndarray], task: Task, real: np.ndarray
) -> dict[str, np.ndarray]:
  return {name: _flat(units[name])[real] for name, _ in task.record.fields if name != "inputs"}


def _flat(values: np.ndarray) -> np.ndarray:
  """[size, K, ...] -> [size * K, ...]."""
  return values.reshape(-1, *values.shape[2:])
