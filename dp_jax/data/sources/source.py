"""Random-access sources of labelled records: the interface, and arrays in memory.

A source is read by index, in any order and as often as the sampler asks, so it has no iterator
state to save or to keep in step across hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from dp_jax.errors import UserError

# Of a longer text in a column a hash is kept: an array of strings is as wide as the longest of
# them, so that one record could take all memory.
LONGEST = 1024
Record = Mapping[str, Any]
ResizePolicy = Literal["centre_crop", "stretch", "none"]
Interpolation = Literal["bilinear", "bicubic"]


class DataError(UserError):
  """What is wrong with data, in words that no record has a part in.

  Attributes:
    detail: what may hold a part of a record: the names in the first line of a table, which is a
      record where it has no names; a folder, a value, a count. Of private data it is not told.
  """

  def __init__(self, message: str, detail: str = ""):
    """Keeps both; only `message` is shown."""
    super().__init__(message)
    self.detail = detail


@contextlib.contextmanager
def telling(public: bool) -> Iterator[None]:
  """Adds the detail to the message of a DataError that is raised inside, of public data.

  Raises:
    ValueError: in its place.
  """
  try:
    yield
  except DataError as error:
    if not public or not error.detail:
      raise
    raise UserError(f"{error}; {error.detail}") from None


class RecordError(UserError):
  """One record cannot be read or decoded; the others may well be fine."""


class Unlabelled(RecordError):
  """A record whose label is to be ignored, by a declared rule: of zero weight, and no mistake."""


@dataclass(frozen=True)
class SourceInfo:
  """What is known of a source without reading its records.

  Nothing here is computed from pixel values or labels, so it may be shown for private data too
  (the number of records where the adjacency makes it public).

  Attributes:
    name: the source and split, for messages and reports.
    num_records: how many records there are.
    input_shape: (height, width, channels) or (features,), or None if records differ.
    num_classes: how many labels the format declares, or None if it declares none.
    value_range: the smallest and largest pixel value that the format allows.
    class_names: one name per label, or empty.
    input_dtype: "uint8", "float16", "bfloat16" or "float32", in which batches are assembled.
    read_on_demand: records lie in files, and checking all of them before a run takes long.
    label_shape: () where a label is one integer; (num_classes,) where it is float32 of that shape:
      1 for yes, 0 for no, -1 for not known.
    private: the files say that the records were made from private ones.
    origin: what the files say of the model that made them: hashes by name; empty if nothing.
    cut: the setting by which other records decide whether a record is among these, or what is taken
      as public of them ("data.num_records=1000"); empty if none does.
  """

  name: str
  num_records: int
  input_shape: tuple[int, ...] | None
  num_classes: int | None
  value_range: tuple[float, float]
  class_names: tuple[str, ...] = ()
  input_dtype: str = "uint8"
  read_on_demand: bool = False
  label_shape: tuple[int, ...] = ()
  private: bool = False
  origin: Mapping[str, Any] = field(default_factory=dict)
  cut: str = ""

  @property
  def dtype(self) -> np.dtype:
    """`input_dtype` as arrays have it; NumPy knows bfloat16 by another package."""
    is_bfloat16 = self.input_dtype == "bfloat16"
    return np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else self.input_dtype)


class Source(Protocol):
  """Labelled records by index: what a source of dp_jax, or of other people, must be.

  A record is a function of its index, the same whenever it is read, and by any thread: `gather` is
  called by several at once. Which records there are, and in which order, must not depend on what
  other records hold. A record that cannot be read is a RecordError whose text says nothing of it;
  another exception stops the run, and so tells of the record. `dp_jax.data.sources.custom` makes a
  source of what has only `__len__` and `__getitem__`.
  """

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""

  def __len__(self) -> int:
    """The number of records."""

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs" [*input_shape] and "label", an integer. May raise RecordError."""

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray] | Iterable[Record | RecordError]:
    """Several records at once.

    A source whose records all have one shape returns them stacked, {"inputs": [n, ...],
    "label": int64[n]}. Any other gives them one by one, with the error in the place of a record
    that cannot be read.
    """

  def column(self, name: str) -> np.ndarray:
    """What every record says in one column, [num_records] of numbers or strings, as they are.

    For units and groups: a patient, a hospital, an age. "" and NaN stand for no value.

    Raises:
      DataError: if the source has no such column; its detail names those that it has.
    """

  def fingerprint(self) -> str:
    """A hash that changes when the records do, their columns among them.

    Each source says how much of the content it covers: all of it, or names, sizes and a sample.
    """


def no_column(info: SourceInfo, name: str, columns: Iterable[str] = ()) -> DataError:
  """The error of a source that has no column of this name."""
  there = ", ".join(sorted(columns)) or "none"
  return DataError(f"{info.name} has no column {name!r}", f"its columns: {there}")


def shortened(cell: str) -> str:
  """A text of a column, or a hash in its place."""
  if len(cell) <= LONGEST:
    return cell
  return f"sha256 {hashlib.sha256(cell.encode(errors='surrogatepass')).hexdigest()}"


def file_of(source: Source, index: int) -> str:
  """The file of a record where a source has one for each, else "": for public data alone."""
  named = getattr(source, "file_of", None)
  return "" if named is None else str(named(index))


def says_nothing(source: Source, index: int) -> bool:
  """Whether a record that can be read tells nothing by its inputs, where a source knows that."""
  asked = getattr(source, "says_nothing", None)
  return asked is not None and bool(asked(index))


def one_by_one(source: Source, indices: np.ndarray) -> Iterator[Record | RecordError]:
  """The records at `indices` (int64[n]), with the error in place of one that cannot be read.

  Each is read when it is asked for, so that only one is in memory beside the batch.
  """
  for index in map(int, indices):
    try:
      yield source[index]
    except RecordError as error:
      yield error


class ArraySource:
  """A source that holds all its records in arrays."""

  def __init__(
    self,
    info: SourceInfo,
    images: np.ndarray,
    labels: np.ndarray,
    columns: Mapping[str, np.ndarray] | None = None,
  ):
    """Keeps the arrays, without a copy.

    Args:
      info: describes the arrays; `input_shape` and `num_records` must agree with them.
      images: [num_records, H, W, C].
      labels: int64[num_records].
      columns: further columns by name, [num_records] of numbers or strings.

    Raises:
      ValueError: if the arrays do not have these shapes.
    """
    expected = (info.num_records, *(info.input_shape or ()))
    if images.shape != expected or labels.shape != (info.num_records,):
      raise UserError(
        f"{info.name}: images {images.shape} and labels {labels.shape} do not fit the declared "
        f"{expected} and {(info.num_records,)}"
      )
    self._info = info
    self._images = images
    self._labels = labels
    self._columns = dict(columns or {})
    for name, values in self._columns.items():
      if values.shape != labels.shape:
        raise UserError(f"{info.name}: column {name!r} has shape {values.shape}")

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs" [H, W, C] and "label"."""
    return {"inputs": self._images[index], "label": int(self._labels[index])}

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The records at `indices` (int64[n]), stacked."""
    return {"inputs": self._images[indices], "label": self._labels[indices]}

  def column(self, name: str) -> np.ndarray:
    """One of the further columns."""
    if name not in self._columns:
      raise no_column(self._info, name, self._columns)
    return self._columns[name]

  def fingerprint(self) -> str:
    """SHA-256 over shapes, dtypes and contents of all arrays."""
    digest = hashlib.sha256()
    columns = [array for _, array in sorted(self._columns.items())]
    for array in (self._images, self._labels, *columns):
      digest.update(f"{array.shape}{array.dtype.str}".encode())
      digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Head:
  """The first records of another source."""

  def __init__(self, source: Source, num_records: int):
    """Cuts `source` to its first `num_records` records, or keeps all if it has fewer."""
    self._source = source
    cut = source.info.cut or f"data.num_records={num_records}"
    self._info = replace(source.info, num_records=min(num_records, len(source)), cut=cut)

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record of the other source."""
    if not 0 <= index < len(self):
      raise IndexError("no such record")
    return self._source[index]

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray] | Iterable[Record | RecordError]:
    """The records at `indices` (int64[n])."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
      raise IndexError("no such records")
    return self._source.gather(indices)

  def file_of(self, index: int) -> str:
    """The file of a record of the other source, "" if it names none."""
    return file_of(self._source, index)

  def says_nothing(self, index: int) -> bool:
    """As the other source says."""
    return says_nothing(self._source, index)

  def column(self, name: str) -> np.ndarray:
    """The first values of a column of the other source."""
    return self._source.column(name)[: len(self)]

  def fingerprint(self) -> str:
    """The other source's hash and the number of records kept."""
    return f"{self._source.fingerprint()}[:{len(self)}]"
