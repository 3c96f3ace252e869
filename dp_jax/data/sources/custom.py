"""Sources of other people: a function that a configuration names, or an object from a program.

A source must be a function of the index alone: the same record whenever it is read, and none whose
place or content depends on other records. Its first records are read twice before a run starts; the
rest is up to who writes it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import numbers
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dp_jax.data.sources.images import FAULTS_OF_THE_MACHINE
from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.source import (
  Record,
  RecordError,
  Source,
  SourceInfo,
  no_column,
  one_by_one,
  shortened,
)
from dp_jax.errors import UserError
from dp_jax.files.code import Arguments, check_arguments, described, load_callable

# What data.source is where a program gives the records themselves.
GIVEN = "given"
_GIVEN = ("split", "path", "seed")
# How many records are read twice.
_TWICE = 8


@dataclass(frozen=True)
class CustomOptions(SourceOptions):
  """Keys of a source that data.source names as "package.module:function".

  It is called as `function(split=..., path=..., seed=..., **kwargs)`, with data.path and data.seed,
  and gives a `Source`, or what `as_source` makes one of. A class will do too.

  Attributes:
    kwargs: what else it is called with: JSON values.
  """

  kwargs: dict[str, Any] = field(default_factory=Arguments)

  def __post_init__(self) -> None:
    """Refuses what it is called with anyway."""
    both = {*self.kwargs} & {*_GIVEN}
    if both:
      raise UserError(f"data.kwargs has {min(both)!r}, which data.source gets from its own key.")

  def open(self, split: str, context: Context) -> Source:
    """Imports the function and calls it.

    Raises:
      UserError: if it cannot be imported or called so, or what it gives is no source.
    """
    function = load_callable(context.source)
    given = {"split": split, "path": context.path, "seed": context.seed, **self.kwargs}
    check_arguments(context.source, function, given)
    return as_source(function(**given), f"{context.source}/{split}", context)

  def code(self, source: str) -> dict[str, Any]:
    """The name, the kwargs and the hash of the module's file."""
    return described(source, self.kwargs)


@dataclass(frozen=True)
class GivenOptions(SourceOptions):
  """Of records that a program gives: `dp_jax.train(..., source=..., eval_source=...)`."""

  READS_PATH = False

  def open(self, split: str, context: Context) -> Source:
    """There is nothing to open."""
    raise UserError(
      f"data.source={GIVEN!r} stands for records that a program gives: dp_jax.train(source=...,"
      " eval_source=...). Name a source that can be opened."
    )


def as_source(found: Any, name: str, context: Context) -> Source:
  """Makes a source of an object that gives records by index.

  Args:
    found: a `Source`; or NumPy arrays by name, {"inputs": [n, ...], "label": [n] or [n, labels],
      ...}, a row a record; or anything with `__len__` and `__getitem__`, such as a list or a data
      set of grain or Hugging Face, of dictionaries {"inputs": numbers, "label": an integer}. What
      else is in them, one number or string each, are columns for units and groups. If it has an
      `info` that is a SourceInfo, that is used.
    name: for messages.
    context: declares the range of the inputs where there is no `info`, and whether labels are
      needed.

  Returns:
    The object itself if nothing of a Source is missing; else `Records` of it.

  Raises:
    UserError: if it is neither, naming what is missing; or if its first records are not the same
      when they are read again: a step that is repeated after a crash would add old noise to new
      gradients.
  """
  kind = type(found)
  if isinstance(found, Mapping) and all(isinstance(each, np.ndarray) for each in found.values()):
    return Arrays(name, found, context)
  missing = [each for each in ("__len__", "__getitem__") if not hasattr(kind, each)]
  if missing or isinstance(found, Mapping | str | bytes):
    what = f"without {' and '.join(missing)}" if missing else "which is not indexed by number"
    raise UserError(
      f"{name} is a {kind.__name__} {what}: a source has __len__, and __getitem__(index) that gives"
      ' {"inputs": ..., "label": ...}.'
    )
  if not len(found):
    raise UserError(f"{name} has no records.")
  source, info = found, getattr(found, "info", None)
  methods = (getattr(found, each, None) for each in ("gather", "column", "fingerprint"))
  if not isinstance(info, SourceInfo):
    source = Records(found, _info(name, len(found), context), context.labelled)
  elif info.num_records != len(found):
    raise UserError(f"{name} has {len(found)} records, and its info says {info.num_records}.")
  elif not all(map(callable, methods)):
    source = Records(found, info, context.labelled)
  if _first(source) != _first(source):
    raise UserError(
      f"the first records of {name} are not the same when they are read again: a source must give"
      " the same record for an index always. Vary records by data.augment."
    )
  return source


def _info(name: str, count: int, context: Context) -> SourceInfo:
  low_high = context.value_range
  if low_high is None or len(low_high) != 2:
    raise UserError(
      f"{name} does not say its value_range: declare data.value_range as (low, high)."
    )
  ends = (low_high[0], low_high[1])
  return SourceInfo(name, count, None, None, ends, input_dtype="float32", read_on_demand=True)


def _first(source: Source) -> list[str]:
  """The first few records, for comparing."""
  found = source.gather(np.arange(min(_TWICE, len(source))))
  return [_content(each) for each in (found.values() if isinstance(found, dict) else found)]


class Arrays:
  """Arrays by name, with a row a record."""

  def __init__(self, name: str, arrays: Mapping[str, np.ndarray], context: Context):
    """Keeps the arrays, without a copy.

    Raises:
      UserError: if there are no inputs, or rows are not as many in all.
    """
    lengths = {key: len(array) if array.ndim else 0 for key, array in arrays.items()}
    if "inputs" not in arrays or len({*lengths.values()}) != 1 or not lengths["inputs"]:
      raise UserError(
        f"{name}: arrays need the name 'inputs' and a row for each record, not {lengths}."
      )
    inputs, label = arrays["inputs"], arrays.get("label", np.zeros(0))
    if inputs.dtype == np.float64:
      arrays = {**arrays, "inputs": inputs.astype(np.float32)}
    dtype = str(arrays["inputs"].dtype)
    known = _info(name, len(inputs), context) if dtype != "uint8" or context.value_range else None
    self._arrays = dict(arrays)
    self._info = SourceInfo(
      name, len(inputs), inputs.shape[1:], None, known.value_range if known else (0.0, 255.0),
      tuple(context.class_names or ()), dtype, label_shape=label.shape[1:],
    )  # fmt: skip

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record."""
    return {name: array[index] for name, array in self._arrays.items()}

  def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The records at `indices` (int64[n]), stacked."""
    return {name: array[indices] for name, array in self._arrays.items()}

  def column(self, name: str) -> np.ndarray:
    """An array of one number or string a record."""
    columns = [key for key, array in self._arrays.items() if array.ndim == 1]
    if name not in columns:
      raise no_column(self._info, name, columns)
    return self._arrays[name]

  def fingerprint(self) -> str:
    """SHA-256 over names, shapes, dtypes and contents."""
    content = [(name, _content(array)) for name, array in sorted(self._arrays.items())]
    return hashlib.sha256(repr(content).encode()).hexdigest()


class Records:
  """The records of an object that has only `__len__` and `__getitem__`, one at a time.

  Whatever is wrong with one record is a RecordError that does not say what it holds. Only one
  thread at a time reads, as the object may not expect more.
  """

  def __init__(self, records: Any, info: SourceInfo, labelled: bool = True):
    """Keeps the object; nothing is read yet. Without `labelled`, a label may be missing."""
    self._records, self._info, self._labelled = records, info, labelled
    self._lock = threading.Lock()

  @property
  def info(self) -> SourceInfo:
    """What is known without reading records."""
    return self._info

  def __len__(self) -> int:
    """The number of records."""
    return self._info.num_records

  def __getitem__(self, index: int) -> Record:
    """One record: "inputs" in the dtype of `info`, "label", and what else there is.

    Raises:
      RecordError: if it cannot be read, or has no such numbers.
    """
    record = self._read(index) if self._labelled else {"label": 0, **self._read(index)}
    if "inputs" not in record:
      raise RecordError("has no inputs")
    try:
      rest = {name: np.asarray(value) for name, value in record.items() if name != "inputs"}
      inputs = np.asarray(record["inputs"])
    except Exception:  # lists of unequal lengths, for example
      raise RecordError("holds no array of numbers, or no label") from None
    if inputs.dtype.kind not in "biuf":
      raise RecordError("holds no array of numbers")
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite
      inputs = inputs.astype(self._info.dtype)
    whole = {name: x.astype(np.int64) if x.dtype == bool else x for name, x in rest.items()}
    return {**whole, "inputs": inputs}

  def gather(self, indices: np.ndarray) -> Iterator[Record | RecordError]:
    """The records at `indices` (int64[n]), with the error in place of an unreadable one."""
    return one_by_one(self, indices)

  def column(self, name: str) -> np.ndarray:
    """What every record has under a name, as strings; "" where it has no number or string.

    Each is a function of its own value alone: a whole number has no point, whatever others are.
    """
    _, columns = self._everything
    if name not in columns:
      raise no_column(self._info, name, columns)
    return np.array(columns[name], np.str_)

  def fingerprint(self) -> str:
    """SHA-256 over all that every record holds; the first call for it or a column reads all."""
    return self._everything[0]

  @functools.cached_property
  def _everything(self) -> tuple[str, dict[str, list[str]]]:
    """The hash, and the columns by name."""
    digest, columns = hashlib.sha256(), dict[str, list[str]]()
    for index in range(len(self)):
      try:
        record = self._read(index)
      except RecordError:
        digest.update(b"unreadable")
        continue
      for key in sorted(map(str, record)):
        value = record.get(key)
        digest.update(f"{key}\0{_content(value)}\0".encode(errors="surrogatepass"))
        text = None if key in ("inputs", "label") else _cell(value)
        if text is not None:
          columns.setdefault(key, [""] * len(self))[index] = shortened(text)
    return digest.hexdigest(), columns

  def _read(self, index: int) -> Mapping[str, Any]:
    try:
      with self._lock:
        record = self._records[index]
    except (RecordError, MemoryError):
      raise
    except OSError as error:
      if error.errno in FAULTS_OF_THE_MACHINE:  # without the name of a file
        raise OSError(error.errno, f"records cannot be read: {error.strerror}") from None
      raise RecordError(f"cannot be read: {type(error).__name__}") from None
    except Exception as error:  # whatever it is depends on this record
      raise RecordError(f"cannot be read: {type(error).__name__}") from None
    if not isinstance(record, Mapping):
      raise RecordError(f"is a {type(record).__name__}, and no dictionary with inputs and label")
    return record


def _cell(value: Any) -> str | None:
  """A number or string as text, a function of it alone; None for anything else."""
  if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
    value = value.item()
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return ""
  if isinstance(value, bytes):
    return value.decode(errors="backslashreplace")
  if isinstance(value, numbers.Integral):  # True is 1
    return str(int(value))
  if isinstance(value, numbers.Real):
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)
  return value if isinstance(value, str) else None


def _content(value: Any) -> str:
  """All of a value, for a hash: of arrays type, shape and bytes."""
  if isinstance(value, Mapping):
    return repr([(str(key), _content(item)) for key, item in value.items()])
  if value is None or isinstance(value, str | bytes | numbers.Number):
    return repr(value)
  try:
    array = np.asarray(value)
  except Exception:  # lists of unequal lengths, for example
    array = np.asarray(None)
  if array.dtype.kind not in "biufcSU":
    several = isinstance(value, list | tuple)
    return repr([_content(each) for each in value]) if several else type(value).__name__
  return f"{array.dtype.str}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
