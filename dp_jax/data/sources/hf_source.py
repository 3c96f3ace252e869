"""Hugging Face data sets that were saved to disk, read through memory maps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dp_jax.data.sources.images import ImageDecoder, ImageOptions
from dp_jax.data.sources.options import Context
from dp_jax.data.sources.source import DataError, Record, RecordError, SourceInfo, no_column
from dp_jax.errors import UserError
from dp_jax.files.ordinary import sample_digest, sizes_of


@dataclass(frozen=True)
class HfOptions(ImageOptions):
  """Keys of Hugging Face data sets.

  Attributes:
    label_columns: its one column of labels; left out, the only ClassLabel, or else "label".
    features: its one column of vectors or arrays.
    image_column: in place of features, the column of images; left out, the only one.
  """

  HOLDS = "data set"
  label_columns: tuple[str, ...] | None = None
  features: tuple[str, ...] | None = None
  image_column: str | None = None

  def __post_init__(self) -> None:
    """Refuses several columns."""
    super().__post_init__()
    if max(len(self.label_columns or ()), len(self.features or ())) > 1:
      raise UserError(
        f"data.features={self.features} and data.label_columns={self.label_columns} of an hf source"
        " must name one column each."
      )

  def open(self, split: str, context: Context) -> HfSource:
    """Opens a split of data.path."""
    images = len(context.input_shape or ()) == 3
    return HfSource(
      context.required_path("a folder of save_to_disk"), split,
      decoder=self.decoder(context.input_shape) if images else None,
      input_column=self.image_column or (self.features or (None,))[0],
      label_column=(self.label_columns or (None,))[0],
    )  # fmt: skip

  @property
  def decodes(self) -> bool:
    """Whether the records are images: unless columns of numbers are named."""
    return self.features is None

  def inputs(self) -> dict[str, Any]:
    """The column of vectors."""
    return {"features": self.features}

  def reading(self) -> dict[str, Any]:
    """All columns, and how images are decoded."""
    columns = {"label_columns": self.label_columns, "image_column": self.image_column}
    return {**columns, **super().reading()}


class HfSource:
  """One split of what `DatasetDict.save_to_disk` wrote.

  The input is a column of encoded images, of vectors of one length, or of arrays of one shape; the
  label is a ClassLabel or an integer.
  """

  def __init__(
    self,
    path: str,
    split: str,
    *,
    decoder: ImageDecoder | None = None,
    input_column: str | None = None,
    label_column: str | None = None,
  ):
    """Opens the split.

    Args:
      path: the folder that was saved.
      split: which of its splits.
      decoder: gives every encoded image its shape.
      input_column: None takes the only column of images.
      label_column: None takes the only ClassLabel, or else "label".

    Raises:
      ValueError: if the package datasets is not installed, the folder or split is not there, or
        a column is missing or of another kind.
    """
    try:
      import datasets
    except ImportError as error:
      raise UserError(
        f"the hf source needs the package datasets: pip install 'dp_jax[hf]' ({error})"
      ) from error
    if not Path(path).is_dir():
      raise UserError(f"no such folder: {path}")
    try:
      loaded = datasets.load_from_disk(path)
    except Exception as error:  # it raises many types
      raise DataError(
        f"{path} was not saved by DatasetDict.save_to_disk, or cannot be read:"
        f" {type(error).__name__}",
        " ".join(str(error).split()),
      ) from None
    if not isinstance(loaded, datasets.DatasetDict):
      raise UserError(f"{path} has no splits: save a DatasetDict of them")
    if split not in loaded:
      raise UserError(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
    whole = loaded[split]
    features = whole.features
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    classes = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    self._input = _chosen(input_column, images, None, features, "data.image_column")
    self._label = _chosen(label_column, classes, "label", features, "data.label_columns")
    self._decoder = decoder if self._input in images else None
    if self._input in images:
      if decoder is None:
        raise UserError("encoded images are brought to one public shape: declare data.input_shape")
      whole = whole.cast_column(self._input, datasets.Image(decode=False))
    self._folder, self._whole = Path(path) / split, whole
    self._rows = whole.select_columns([self._input, self._label])
    if self._decoder is None:
      self._rows = self._rows.with_format("numpy")
    kind = features[self._label]
    names = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else ()
    if not names and "int" not in str(getattr(kind, "dtype", "")):
      raise UserError(f"column {self._label!r} holds no labels: {kind}")
    shape, dtype = (
      (self._decoder.shape, "uint8") if self._decoder else _array(self._input, features)
    )
    low_high = (0.0, 255.0) if dtype == "uint8" else (-1.0, 1.0)
    self._info = SourceInfo(
      f"hf/{split}", len(whole), shape, len(names) or None, low_high, names, dtype, True
    )

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs" [*input_shape] and "label".

    Raises:
      RecordError: if it has no input or label, or cannot be decoded.
    """
    (record,) = self._each(np.asarray([index]))
    if isinstance(record, RecordError):
      raise record
    return record

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray] | Iterable[Record | RecordError]:
    """The records at `indices` (int64[n]): arrays stacked, images one by one."""
    if self._decoder is not None or not len(indices):
      return self._each(indices)
    rows = self._rows[indices]
    inputs, labels = rows[self._input], rows[self._label]
    if not _is_stacked(inputs, labels):  # a value is missing
      return self._each(indices)
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite
      return {"inputs": inputs.astype(self._info.input_dtype), "label": labels}

  def column(self, name: str) -> np.ndarray:
    """A column of numbers or strings, [num_records]; "" and NaN for no value.

    Raises:
      DataError: if there is none of that name, or it holds lists or fields: as texts, those of two
        people would be a third.
    """
    if name not in self._whole.column_names:
      raise no_column(self._info, name, self._whole.column_names)
    values = self._whole.select_columns([name]).with_format("arrow")[:][name]
    if pa.types.is_nested(values.type):
      raise DataError(f"{self._info.name}: column {name!r} has no one value for each record")
    if pa.types.is_integer(values.type) and values.null_count:
      values = values.cast(pa.string())  # as floats, two large ones could become one
    array = values.to_numpy()
    if array.dtype.kind in "biuf":
      return array
    return np.array(["" if value is None else _text(value) for value in array])

  def fingerprint(self) -> str:
    """SHA-256 over names and sizes of the Arrow files, the library's own hash, and the columns.

    And over their content where that is 64 MiB or less; else over a sample, as
    `dp_jax.files.ordinary.sample_digest` takes it.
    """
    digest = hashlib.sha256(repr((self._decoder, self._input, self._label)).encode())
    files = sorted(self._folder.iterdir())
    sizes = sizes_of(files)
    for file, size in zip(files, sizes, strict=True):
      digest.update(f"{file.name} {size} ".encode())
      if file.suffix == ".json":
        digest.update(file.read_bytes())
    digest.update(sample_digest(files, sizes).encode())
    return digest.hexdigest()

  def _each(self, indices: np.ndarray) -> Iterator[Record | RecordError]:
    if not len(indices):
      return
    rows = self._rows[indices]
    for value, label in zip(rows[self._input], rows[self._label], strict=True):
      try:
        yield {"inputs": self._pixels(value), "label": int(_known(label, "label"))}
      except RecordError as error:
        yield error
      except (TypeError, ValueError, OverflowError, KeyError):  # it lacks one of its numbers
        yield RecordError("holds no array of numbers, or no label")

  def _pixels(self, value: Any) -> np.ndarray:
    value = _known(value, "input")
    if self._decoder is None:
      with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value).astype(self._info.input_dtype)
    return self._decoder.decode(_known(value["bytes"], "input"))


def _text(value: Any) -> str:
  return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _known(value: Any, name: str) -> Any:
  if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
    raise RecordError(f"has no {name}")
  return value


def _is_stacked(inputs: Any, labels: Any) -> bool:
  return isinstance(inputs, np.ndarray) and inputs.dtype.kind in "uif" and labels.dtype.kind in "ui"


def _chosen(
  declared: str | None, only: list[str], usual: str | None, columns: Iterable[str], key: str
) -> str:
  """The declared column, or the only one of its kind, or the usual name."""
  name = declared or (only[0] if len(only) == 1 else usual)
  if name is None or name not in columns:
    what = f"has no column {name!r}" if name else "has no or several columns of images"
    # A table that was read without names has its first record for them.
    raise DataError(f"the data set {what}: set {key}", f"its columns: {', '.join(columns)}")
  return name


def _array(name: str, features: Any) -> tuple[tuple[int, ...], str]:
  """Shape and dtype of a column of vectors or arrays."""
  kind = features[name]
  shape = getattr(kind, "shape", None) or (getattr(kind, "length", -1),)
  dtype = str(getattr(kind, "dtype", None) or getattr(kind.feature, "dtype", ""))
  if min(shape) < 1 or len(shape) not in (1, 3) or not dtype.startswith(("float", "uint", "int")):
    raise UserError(
      f"column {name!r} must hold images, vectors of one length or arrays of one shape, not {kind}"
    )
  return tuple(shape), dtype if dtype in ("uint8", "float16", "float32") else "float32"
