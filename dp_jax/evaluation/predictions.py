"""What a model said of each held-out record: the table from which subgroups are evaluated.

It holds what metrics of records need and no more, so that its size does not grow with the number of
classes. It says of every person how the model did on them: of private data, it is private.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from dp_jax.errors import UserError
from dp_jax.evaluation.scores import ranking_metrics

_GROUP = "group:"
_ABOUT = "about"


@dataclass(frozen=True)
class PredictionTable:
  """One row a record that could be read.

  Attributes:
    record: int64[n], its index in the split.
    unit: int64[n], the unit (person) that it belongs to, in 0..num_units - 1.
    label: int32[n]; of several labels int32[n, num_labels]: 1, 0, or -1 for not known.
    predicted: of that shape; a record whose prediction is not a number has a wrong one.
    label_probability: float32 of that shape, of what is true.
    score: float32[n], what ranks records, higher for class 1, where there are two classes; of
      several labels float32[n, num_labels], higher for yes; else [0]. Logits, or in files of
      earlier versions probabilities, which are equal where a model is sure.
    groups: [n] strings for each column.
    about: what tells which records these are and which model it was: JSON values.
  """

  record: np.ndarray
  unit: np.ndarray
  label: np.ndarray
  predicted: np.ndarray
  label_probability: np.ndarray
  score: np.ndarray
  groups: Mapping[str, np.ndarray] = field(default_factory=dict)
  about: Mapping[str, Any] = field(default_factory=dict)

  @property
  def is_binary(self) -> bool:
    """Whether there are two classes, so that records can be ranked."""
    return not self.is_multilabel and len(self.score) == len(self.label)

  @property
  def is_multilabel(self) -> bool:
    """Whether there are several labels, each a yes or no of its own."""
    return self.label.ndim == 2

  @property
  def num_units(self) -> int:
    """How many units have a record here."""
    return len(np.unique(self.unit))

  def losses(self) -> np.ndarray:
    """float64 of the shape of `label`: cross-entropies in nats, at most 87.3."""
    return cross_entropy(self.label_probability.astype(np.float64))

  def rankings(self) -> dict[str, float | None]:
    """AUROC and average precision of class 1; empty unless there are two classes."""
    return ranking_metrics(self.score, self.label) if self.is_binary else {}

  def of_people(
    self, units: np.ndarray, groups: Mapping[str, np.ndarray], about: Mapping[str, Any]
  ) -> "PredictionTable":
    """The same predictions, told whose records they are.

    Args:
      units: int[num_records], the unit of every record of the split.
      groups: [num_records] strings for each column.
      about: what tells which records these are and which model it was: JSON values.
    """
    groups = {name: np.asarray(values)[self.record] for name, values in groups.items()}
    return replace(self, unit=np.asarray(units)[self.record], groups=groups, about=about)

  def to_bytes(self) -> bytes:
    """The table as an .npz file; it holds no pickled objects."""
    arrays = {name: getattr(self, name) for name in _array_names()}
    arrays |= {f"{_GROUP}{name}": np.asarray(v, np.str_) for name, v in self.groups.items()}
    file = io.BytesIO()
    arrays[_ABOUT] = np.array(json.dumps(dict(self.about)))
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


class TableBuilder:
  """Collects a table from batches, in order."""

  def __init__(self, num_classes: int, several: bool = False):
    self._num_classes, self._several = num_classes, several
    self._parts: list[tuple[np.ndarray, ...]] = []

  def add(
    self, records: np.ndarray, probabilities: np.ndarray, labels: np.ndarray, mask: np.ndarray,
    scores: np.ndarray | None = None,
  ) -> None:  # fmt: skip
    """Adds records; masked ones are left out.

    Args:
      records: int[n].
      probabilities: float[n, num_classes].
      labels: int[n], or [n, num_classes] of several labels.
      mask: bool[n].
      scores: float[n, s], logits: of two classes one, of several labels one each. None, or no
        column, ranks by probabilities.
    """
    records, labels = records[mask], labels[mask]
    probabilities = np.array(probabilities[mask], np.float32)
    ranked = None if scores is None or not scores.shape[1] else np.array(scores[mask], np.float32)
    if self._several:
      self._parts.append((records, *_yes_or_no(probabilities, labels, ranked)))
      return
    failed = ~np.isfinite(probabilities).all(axis=1)
    probabilities[failed] = 0.0
    predicted = probabilities.argmax(axis=1)
    predicted[failed] = (labels[failed] + 1) % self._num_classes
    chosen = probabilities[np.arange(len(labels)), labels]
    score = np.zeros(0, np.float32)
    if self._num_classes == 2:
      score = probabilities[:, 1].copy() if ranked is None else ranked[:, 0]
    score[failed[: len(score)]] = np.nan
    self._parts.append((records, labels, predicted, chosen, score))

  def table(self) -> PredictionTable:
    """The table of what was added, each record its own unit and without groups."""
    none = np.zeros((0, self._num_classes) if self._several else 0)
    empty = (np.zeros(0, int), none, none, none, none)
    record, label, predicted, chosen, score = map(
      np.concatenate, zip(*(self._parts or [empty]), strict=True)
    )
    record = record.astype(np.int64)
    return PredictionTable(
      record=record,
      unit=record,
      label=label.astype(np.int32),
      predicted=predicted.astype(np.int32),
      label_probability=chosen.astype(np.float32),
      score=score.astype(np.float32),
    )


def _yes_or_no(
  probabilities: np.ndarray, labels: np.ndarray, logits: np.ndarray | None
) -> tuple[np.ndarray, ...]:
  """Labels, predictions, probabilities of what is true, and scores, each [n, num_labels]."""
  labels = labels.astype(np.int32)
  failed = ~np.isfinite(probabilities)
  predicted = np.where(failed, labels != 1, probabilities > 0.5).astype(np.int32)
  chosen = np.where(labels == 1, probabilities, 1 - probabilities)
  if logits is not None:  # 1 - p is 0 long before the other probability is
    chosen = expit(np.where(labels == 1, logits, -logits).astype(np.float64))
  score = probabilities if logits is None else np.where(failed, np.nan, logits)
  return labels, predicted, np.where(failed, 0.0, chosen), score


def cross_entropy(chosen: np.ndarray) -> np.ndarray:
  """Losses from the probability of what is true, in nats; at most 87.3."""
  return -np.log(np.maximum(chosen, np.finfo(np.float32).tiny))


def load_predictions(path: Path) -> PredictionTable:
  """Reads what `PredictionTable.to_bytes` wrote.

  Raises:
    ValueError: if the file is missing or is no such table.
  """
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    about = json.loads(str(arrays.pop(_ABOUT)))
    groups = {k.removeprefix(_GROUP): arrays.pop(k) for k in [*arrays] if k.startswith(_GROUP)}
    return PredictionTable(**arrays, groups=groups, about=about)
  except OSError as error:
    raise UserError(f"cannot read predictions {str(path)!r}: {error.strerror or error}") from error
  except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
    raise UserError(f"{str(path)!r} holds no predictions: {error}") from error


def check_same_data(tables: Sequence[PredictionTable]) -> None:
  """Refuses tables of different records: a difference between them says nothing of the models.

  Raises:
    ValueError: says what differs.
  """
  first = tables[0]
  for table in tables[1:]:
    for what in ("data_digest", "split"):
      if first.about.get(what) != table.about.get(what):
        raise UserError(
          "the two runs were evaluated on different records (their "
          f"{'data' if what == 'data_digest' else 'splits'} differ), so they cannot be paired:"
          " evaluate both on the same data.eval_split."
        )
    if not all(np.array_equal(getattr(first, k), getattr(table, k)) for k in ("record", "label")):
      raise UserError("the two runs read different records or labels, so they cannot be paired.")


def check_same_records(tables: Sequence[PredictionTable]) -> None:
  """Refuses tables that cannot be paired record by record, person by person.

  Raises:
    ValueError: says what differs.
  """
  check_same_data(tables)
  for table in tables[1:]:
    if not np.array_equal(tables[0].unit, table.unit):
      raise UserError(
        "the two runs group records into different units: give both the same privacy.unit."
      )


def _array_names() -> list[str]:
  return [each.name for each in fields(PredictionTable) if each.name not in ("groups", "about")]
