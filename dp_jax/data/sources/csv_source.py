"""Records in CSV files: columns of numbers or of image paths, labels, units and groups.

Everything that a record is scaled by or filled up with is declared; nothing is computed from the
columns, where it would depend on other records.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dp_jax.data.sources.absent import ABSENT_IDS, absent
from dp_jax.data.sources.csv_options import CsvOptions
from dp_jax.data.sources.images import ImageDecoder
from dp_jax.data.sources.options import Context
from dp_jax.data.sources.source import Record, RecordError, SourceInfo, Unlabelled
from dp_jax.data.unit_ids import canonical
from dp_jax.errors import UserError
from dp_jax.files.ordinary import sample_digest, sizes_of

if TYPE_CHECKING:
  from dp_jax.data.sources.table import Table

UNKNOWN = -1  # a label that is not known
_UNCERTAIN_CELL = -1.0


class CsvSource:
  """One split of a CSV file, its columns in memory.

  A row with a cell that cannot be read is a RecordError; one whose label is to be ignored has zero
  weight and is no error.
  """

  def __init__(
    self,
    table: Table,
    name: str,
    options: CsvOptions,
    context: Context,
    decoder: ImageDecoder | None,
  ):
    """Reads labels and features.

    Args:
      table: the rows of the split.
      name: for messages.
      options: how they become records.
      context: whether there are labels; the rest of it is for the fingerprint.
      decoder: of the images, where options.image_column is set.

    Raises:
      ValueError: if there is no such column, or no row.
    """
    if not table.num_rows:
      raise UserError(f"{name} has no rows")
    self._table, self._decoder = table, decoder
    self._options, self._context = options, context
    self._errors: dict[int, RecordError] = {}
    self._labels = self._read_labels()
    self._nothing = np.full(table.num_rows, decoder is None)
    self._inputs = self._read_features() if decoder is None else None
    self._paths = None if decoder is None else table.text(options.image_column or "").to_pylist()
    # Where paths start, with a slash at the end.
    self._root = os.path.join(os.path.abspath(options.image_root or table.path.parent), "")
    self._errors |= {row: RecordError(f"the row {what}") for row, what in table.malformed.items()}
    self._bad = np.zeros(table.num_rows, bool)
    self._bad[list(self._errors)] = True
    width = len(options.features or ()) * (2 if options.missing_indicators else 1)
    classes = options.class_names or options.label_columns or ()
    self._info = SourceInfo(
      name=name,
      num_records=table.num_rows,
      input_shape=(width,) if decoder is None else decoder.shape,
      num_classes=len(classes),
      value_range=(-1.0, 1.0) if decoder is None else (0.0, 255.0),
      class_names=classes,
      input_dtype="float32" if decoder is None else "uint8",
      read_on_demand=decoder is not None,
      label_shape=options.label_shape,
    )

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs", and "label", an integer or float32[num_classes].

    Raises:
      RecordError: if a cell or the image cannot be read, or the label is to be ignored.
    """
    if index in self._errors:
      raise type(self._errors[index])(str(self._errors[index]))  # afresh, without a traceback
    if self._inputs is not None:
      inputs = self._inputs[index]
    elif self._decoder is not None and self._paths is not None and self._paths[index]:
      inputs = self._decoder.read(self._image(self._paths[index]))
    else:
      raise RecordError("has no image path")
    return {"inputs": inputs, "label": self._labels[index]}

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray] | Sequence[Record | RecordError]:
    """The records at `indices` (int64[n]): stacked, or one by one where one has an error."""
    if self._inputs is not None and not self._bad[indices].any():
      return {"inputs": self._inputs[indices], "label": self._labels[indices]}
    records: list[Record | RecordError] = []
    for index in map(int, indices):
      if index in self._errors:
        records.append(self._errors[index])
        continue
      try:
        records.append(self[index])
      except RecordError as error:
        records.append(error)
    return records

  def file_of(self, index: int) -> str:
    """The image file of a record, "" for none: for messages on public data alone."""
    named = "" if self._paths is None else self._paths[index]
    return os.path.join(self._root, named) if named else ""

  def says_nothing(self, index: int) -> bool:
    """Whether no feature of a record has a value within its declared range."""
    return bool(self._nothing[index])

  def column(self, name: str) -> np.ndarray:
    """A column as strings without spaces around them; "" for no value.

    Only an empty cell, and what data.missing_values names, has none: "NA" may be a hospital.

    Raises:
      DataError: if the file has no such column.
    """
    return self._table.strings(name)

  def fingerprint(self) -> str:
    """SHA-256 over the whole file, the name of the split and how rows are read.

    Of images also over the size of each, and over their content where that is 64 MiB or less; else
    over a sample, as `dp_jax.files.ordinary.sample_digest` takes it.
    """
    return self._digest

  @functools.cached_property
  def _digest(self) -> str:
    how = _as_first_written(self._options, self._context)
    description = f"({self._table.digest!r}, {self._info.name!r}, {how}, {self._decoder!r})"
    digest = hashlib.sha256(description.encode())
    if self._paths is not None:
      paths = [self._path(cell) for cell in self._paths]
      digest.update(sample_digest(paths, sizes_of(paths)).encode())
    return digest.hexdigest()

  def _path(self, cell: str) -> str:
    """The file that a cell names; "" if it can be none, or lies outside a declared image_root."""
    if "\0" in cell:
      return ""
    path = os.path.normpath(os.path.join(self._root, cell))
    inside = self._options.image_root is None or path.startswith(self._root)
    return path if inside else ""

  def _image(self, cell: str) -> str:
    path = self._path(cell)
    if not path:
      raise RecordError("has an image path that no file has, or out of data.image_root")
    return path

  def _fail(self, rows: np.ndarray, error: RecordError) -> None:
    for row in np.flatnonzero(rows):
      self._errors.setdefault(int(row), error)

  def _read_features(self) -> np.ndarray:
    """float32[num_records, width], in [-1, 1]."""
    options, columns, missing = self._options, [], []
    for name, (low, high), default in zip(
      options.features or (), options.feature_ranges or (), options.defaults or (), strict=True
    ):
      values, malformed = self._table.numbers(name)
      self._fail(malformed, RecordError(f"column {name!r} holds what is no finite number"))
      empty = np.isnan(values)
      self._nothing &= ~((values >= low) & (values <= high))
      filled = np.clip(np.where(empty, default, values), low, high)
      columns.append((filled - low) / (high - low) * 2 - 1)
      missing.append(empty.astype(np.float64))
    both = columns + (missing if options.missing_indicators else [])
    return np.stack(both, axis=1).astype(np.float32)

  def _read_labels(self) -> np.ndarray:
    """int64[num_records], or float32[num_records, num_classes] of several columns."""
    named, several = self._options.label_columns or (), self._options.label_shape
    if not self._context.labelled:
      shape = (self._table.num_rows, len(named))
      return np.full(shape, UNKNOWN, np.float32) if several else np.zeros(shape[0], np.int64)
    if several:
      columns = [self._known(name, self._binary(name)) for name in named]
      return np.stack(columns, axis=1).astype(np.float32)
    (name,) = named
    labels = self._known(name, self._classes(name))
    self._fail(labels == UNKNOWN, Unlabelled("has a label that is to be ignored"))
    return labels

  def _known(self, name: str, labels: np.ndarray) -> np.ndarray:
    """Labels with the rules for uncertain and blank cells applied; -1 where they say ignore."""
    options = self._options
    numbers, _ = self._table.numbers(name)
    unknown = labels == UNKNOWN
    blank = unknown & self._table.absent(name)  # a class of that name is known
    uncertain = unknown & (numbers == _UNCERTAIN_CELL)
    self._fail(
      unknown & ~uncertain & ~blank, RecordError(f"column {name!r} holds what is no label")
    )
    labels = labels.copy()
    if options.uncertain != "ignore":
      labels[uncertain] = 1 if options.uncertain == "ones" else 0
    if options.blank != "ignore":
      labels[blank] = 0
    return labels

  def _binary(self, name: str) -> np.ndarray:
    """int64[num_records]: 0, 1, or -1 for anything else."""
    numbers, _ = self._table.numbers(name)
    return np.where(np.isin(numbers, (0, 1)), np.nan_to_num(numbers), UNKNOWN).astype(np.int64)

  def _classes(self, name: str) -> np.ndarray:
    """int64[num_records]: the class whose name a cell holds, or -1."""
    text, (numbers, _) = self._table.strings(name), self._table.numbers(name)
    labels = np.full(len(text), UNKNOWN, np.int64)
    for label, cell in enumerate(self._options.class_names or ()):
      same = text == cell.strip()
      with contextlib.suppress(ValueError):  # the name of a class may be no number
        same |= numbers == float(cell)
      labels[same] = label
    return labels


@dataclass(frozen=True)
class Csv(CsvOptions):
  """Keys of tables, and how these are opened."""

  def open(self, split: str, context: Context) -> CsvSource:
    """Opens one split of data.path: a file, or a folder with a file SPLIT.csv for each split.

    A file needs data.split_column or data.eval_fraction.

    Raises:
      UserError: if there is no such file, column or split, or keys contradict each other.
    """
    from dp_jax.data.sources.table import read_table  # with the library that reads tables

    self.check(context)
    location = Path(context.required_path("a file or folder"))
    chosen = self.split_column is not None or self.eval_fraction is not None
    if location.is_dir() == chosen:
      raise UserError(
        f"data.path={context.path!r} must be a folder with {split}.csv, or a file with"
        " data.split_column or data.eval_fraction set"
      )
    file = location / f"{split}.csv" if location.is_dir() else location
    table = read_table(file, context.missing_values)
    if self.split_column is not None:
      table = table.rows(table.strings(self.split_column) == split)
    elif context.unit is not None and self.eval_fraction is not None:
      held_out = _held_out(table.strings(context.unit), self.eval_fraction, context)
      table = table.rows(held_out if split == context.eval_split else ~held_out)
    decoder = self.decoder(context.input_shape) if self.decodes else None
    return CsvSource(table, f"{table.path.name}/{split}", self, context, decoder)


def _held_out(units: np.ndarray, fraction: float, context: Context) -> np.ndarray:
  """bool[n]: a function of the unit's id alone, so that all rows of a person are on one side.

  Rows without an id are not held out: in training they are used by no unit.
  """
  ids, inverse = np.unique(canonical(units), return_inverse=True)
  salt = context.seed.to_bytes(8, "little")
  draws = np.array([
    int.from_bytes(hashlib.blake2b(each.encode(), digest_size=6, salt=salt).digest(), "little")
    for each in ids.tolist()
  ])  # fmt: skip
  chosen = draws < fraction * 2**48
  return (chosen & ~absent(ids, context.missing_values, ABSENT_IDS))[inverse]


def _as_first_written(options: CsvOptions, context: Context) -> str:
  """How rows are read, in a form that does not change with this code: else fingerprints would."""
  several = ("label_columns", "class_names", "features", "feature_ranges")
  others = ("feature_defaults", "missing_indicators", "image_column", "image_root", "uncertain",
            "blank", "split_column", "eval_fraction")  # fmt: skip
  values = {
    **{name: getattr(options, name) or () for name in several},
    **{name: getattr(options, name) for name in others},
    "eval_split": context.eval_split, "unit_column": context.unit, "seed": context.seed,
    "labelled": context.labelled, "missing_values": context.missing_values,
  }  # fmt: skip
  return f"TableSpec({', '.join(f'{name}={value!r}' for name, value in values.items())})"
