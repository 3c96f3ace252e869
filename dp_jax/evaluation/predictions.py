"""What a model said of each held-out record: the table from which subgroups are evaluated.

It holds what metrics of records need and no more, so that its size does not grow with the number of
classes; every metric is a function of it. It says of every person how the model did on them: of
private data, it is private.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

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
    columns: what the task says of each record, [n, ...] by name. Of classes and labels:
      "label", int32[n], of several labels int32[n, num_labels]: 1, 0, or -1 for not known;
      "predicted", of that shape; a record whose prediction is not a number has a wrong one;
      "label_probability", float32 of that shape, of what is true;
      "score", float32[n], what ranks records, higher for class 1, where there are two classes; of
      several labels float32[n, num_labels], higher for yes; else [0]. Logits, or in files of
      earlier versions probabilities, which are equal where a model is sure.
    groups: [n] strings for each column.
    about: what tells which records these are and which model it was: JSON values.
  """

  record: np.ndarray
  unit: np.ndarray
  columns: Mapping[str, np.ndarray]
  groups: Mapping[str, np.ndarray] = field(default_factory=dict)
  about: Mapping[str, Any] = field(default_factory=dict)

  @classmethod
  def of_labels(
    cls, record: np.ndarray, unit: np.ndarray, label: np.ndarray, predicted: np.ndarray,
    label_probability: np.ndarray, score: np.ndarray,
    groups: Mapping[str, np.ndarray] | None = None, about: Mapping[str, Any] | None = None,
    **more: np.ndarray,
  ) -> "PredictionTable":  # fmt: skip
    """A table of classes or labels, from its columns."""
    columns = {"label": label, "predicted": predicted, "label_probability": label_probability,
               "score": score, **more}  # fmt: skip
    return cls(record, unit, columns, groups or {}, about or {})

  @property
  def label(self) -> np.ndarray:
    """The column "label"; of a task without labels, a UserError."""
    return self._column("label")

  @property
  def predicted(self) -> np.ndarray:
    """The column "predicted"."""
    return self._column("predicted")

  @property
  def label_probability(self) -> np.ndarray:
    """The column "label_probability"."""
    return self._column("label_probability")

  @property
  def score(self) -> np.ndarray:
    """The column "score"."""
    return self._column("score")

  def _column(self, name: str) -> np.ndarray:
    if name not in self.columns:
      raise UserError(
        f"these predictions have no {name!r} (their columns are {', '.join(self.columns)}): this is"
        " for tasks of classes or labels."
      )
    return self.columns[name]

  @property
  def is_binary(self) -> bool:
    """Whether there are two classes, so that records can be ranked."""
    return not self.has_several_labels and len(self.score) == len(self.label)

  @property
  def has_several_labels(self) -> bool:
    """Whether each record has several labels, each a yes or no of its own."""
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
    arrays = {"record": self.record, "unit": self.unit, **self.columns}
    arrays |= {f"{_GROUP}{name}": np.asarray(v, np.str_) for name, v in self.groups.items()}
    file = io.BytesIO()
    arrays[_ABOUT] = np.array(json.dumps(dict(self.about)))
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


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
    record, unit = arrays.pop("record"), arrays.pop("unit")
    return PredictionTable(record, unit, arrays, groups, about)
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
    same = np.array_equal(first.columns.get("label", ()), table.columns.get("label", ()))
    if not same or not np.array_equal(first.record, table.record):
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
