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

from dp_jax.evaluation.scores import ranking_metrics

_GROUP = "group:"
_ABOUT = "about"


@dataclass(frozen=True)
class PredictionTable:
  """One row a record that could be read.

  Attributes:
    record: int64[n], its index in the split.
    unit: int64[n], the unit (person) that it belongs to, in 0..num_units - 1.
    label: int32[n].
    predicted: int32[n]; a record whose prediction is not a number has a wrong one.
    label_probability: float32[n], of the true class.
    score: float32[n] the probability of class 1 where there are two classes, else [0].
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
    return bool(len(self.score) == len(self.label))

  @property
  def num_units(self) -> int:
    """How many units have a record here."""
    return len(np.unique(self.unit))

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

  def __init__(self, num_classes: int):
    self._num_classes = num_classes
    self._parts: list[tuple[np.ndarray, ...]] = []

  def add(
    self, records: np.ndarray, probabilities: np.ndarray, labels: np.ndarray, mask: np.ndarray
  ) -> None:
    """Adds records: int[n], float[n, num_classes], int[n], bool[n]; masked ones are left out."""
    records, labels = records[mask], labels[mask]
    probabilities = np.array(probabilities[mask], np.float32)
    failed = ~np.isfinite(probabilities).all(axis=1)
    probabilities[failed] = 0.0
    predicted = probabilities.argmax(axis=1)
    predicted[failed] = (labels[failed] + 1) % self._num_classes
    chosen = probabilities[np.arange(len(labels)), labels]
    score = probabilities[:, 1].copy() if self._num_classes == 2 else np.zeros(0, np.float32)
    score[failed[: len(score)]] = np.nan
    self._parts.append((records, labels, predicted, chosen, score))

  def table(self) -> PredictionTable:
    """The table of what was added, each record its own unit and without groups."""
    empty = (np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), np.zeros(0), np.zeros(0))
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
    raise ValueError(f"cannot read predictions {str(path)!r}: {error.strerror or error}") from error
  except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f"{str(path)!r} holds no predictions: {error}") from error


def check_same_records(tables: Sequence[PredictionTable]) -> None:
  """Refuses tables that cannot be paired record by record.

  Raises:
    ValueError: says what differs.
  """
  first = tables[0]
  for table in tables[1:]:
    for what in ("data_digest", "split"):
      if first.about.get(what) != table.about.get(what):
        raise ValueError(
          "the two runs were evaluated on different records (their "
          f"{'data' if what == 'data_digest' else 'splits'} differ), so they cannot be paired:"
          " evaluate both on the same data.eval_split."
        )
    if not all(np.array_equal(getattr(first, k), getattr(table, k)) for k in ("record", "label")):
      raise ValueError("the two runs read different records or labels, so they cannot be paired.")
    if not np.array_equal(first.unit, table.unit):
      raise ValueError(
        "the two runs group records into different units: give both the same privacy.unit."
      )


def _array_names() -> list[str]:
  return [each.name for each in fields(PredictionTable) if each.name not in ("groups", "about")]
