"""What a task is: everything that depends on what a record holds and on what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dp_jax.data.records import RecordSpec
from dp_jax.evaluation.predictions import PredictionTable

# A bound model: inputs [n, ...] -> outputs. An `nnx.Module`, or any function.
Model = Any
# One unit: each field of the record, [K, *shape], and "record_mask" bool[K].
Unit = dict[str, Any]


class Task(Protocol):
  """The loss of a unit, predictions and metrics; nothing else knows what a record means.

  A task of your own is a class with these members, named in `config.task.name` as
  "package.module:Class" and called with `config.task.kwargs`, and with `info`, what the source
  declares (`SourceInfo`), if its signature has it. Subclass `BaseTask` to inherit what is general.

  Attributes:
    record: the fields of a record; the source is checked against it.
  """

  @property
  def record(self) -> RecordSpec:
    """The fields of a record, what feeds the model among them as "inputs"."""

  def facts(self) -> Mapping[str, Any]:
    """What is declared or taken as public of records: JSON values, for statement and weights.

    A constructor of a model gets those that its signature names: "num_classes", "input_shape".
    """

  def loss(self, model: Model, unit: Unit, key: Any) -> jax.Array:
    """The loss of one unit, float32[]: the mean over the records that `record_mask` says are real.

    It must not depend on what the others hold, not even where it is NaN, and be 0 without one.
    """

  def predict(self, model: Model, inputs: jax.Array) -> jax.Array:
    """Rows of predictions, float32[n, ...], of raw inputs [n, ...]: what users see."""

  def evaluated(self, model: Model, inputs: jax.Array) -> jax.Array:
    """What `rows` takes, [n, ...], of raw inputs: the predictions, or more than these."""

  def made_up_units(self, count: int, max_records_per_unit: int) -> Unit:
    """Units [count, K, ...] that hold nothing of the data, to check and compare on."""

  def rows(self, outputs: np.ndarray, fields: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The columns of a table of predictions, [n, ...] each: all that the metrics need.

    Args:
      outputs: of `evaluated`, [n, ...].
      fields: of the same records, [n, ...] each.
    """

  @property
  def metrics(self) -> Sequence[str]:
    """Names of `scalars` by which a checkpoint may be chosen; () for none."""

  def scalars(self, table: PredictionTable) -> dict[str, float | None]:
    """Metrics by name; None where there is no record for one. One may be called "accuracy"."""

  def details(self, table: PredictionTable) -> dict[str, Any]:
    """The scalars, and what tables and plots need: JSON values."""

  def cells(self, prediction: np.ndarray) -> Sequence[str]:
    """One row of `predict` as texts, for files of predictions."""

  @property
  def columns(self) -> Sequence[str]:
    """The names of `cells`."""


class BaseTask:
  """What most tasks have in common."""

  def facts(self) -> Mapping[str, Any]:
    """Nothing."""
    return {}

  def evaluated(self, model: Model, inputs: jax.Array) -> jax.Array:
    """The predictions."""
    return self.predict(model, inputs)  # type: ignore[attr-defined, no-any-return]

  def details(self, table: PredictionTable) -> dict[str, Any]:
    """The scalars, and how many records there are."""
    return {**self.scalars(table), "num_records": len(table.record)}  # type: ignore[attr-defined]

  @property
  def metrics(self) -> Sequence[str]:
    """None."""
    return ()

  @property
  def columns(self) -> Sequence[str]:
    """One column."""
    return ("prediction",)

  def cells(self, prediction: np.ndarray) -> Sequence[str]:
    """The numbers of a prediction, with ";" between."""
    return (";".join(f"{value:.6g}" for value in np.ravel(prediction)),)
