"""What a well-formed record looks like, and what is done with one that is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dp_jax.data.sources.source import Record, RecordError, Source, SourceInfo, Unlabelled
from dp_jax.errors import UserError

# How many records `check_records` asks for at once.
_CHECK_CHUNK = 1024
_ALIGNMENT = 64


class Field:
  """One field of a record: what its value looks like; declared, never read off the records.

  Attributes:
    shape: of the value of one record.
    dtype: in which batches are assembled; None takes what the source declares.
  """

  shape: tuple[int, ...]
  dtype: str | None

  def problem(self, value: np.ndarray, dtype: np.dtype) -> str | None:
    """What is wrong with one value, of which batches are assembled in `dtype`; or None."""
    raise NotImplementedError

  def good(self, values: np.ndarray) -> np.ndarray:
    """bool[n], which of n stacked values, [n, *shape], have nothing wrong with them."""
    raise NotImplementedError

  def known(self, values: np.ndarray) -> np.ndarray:
    """bool[n], which of n good values say something; a label may be declared not to."""
    return np.ones(len(values), bool)

  def contradiction(self, info: SourceInfo) -> str | None:
    """What a source declares that contradicts this field, before any record is read; or None."""
    return None


@dataclass(frozen=True)
class Numbers(Field):
  """Inputs: numbers of one shape, an image or a vector.

  A value outside the range that a model expects is no error, since clipping bounds what it can do;
  one that is not finite is.
  """

  shape: tuple[int, ...]
  dtype: str | None = None

  def problem(self, value: np.ndarray, dtype: np.dtype) -> str | None:
    """Another shape, a dtype that would lose something, or a number that is not finite."""
    if value.shape != self.shape:
      return f"the image has shape {value.shape}, not {self.shape}"
    numeric = value.dtype.kind in "uif" and np.can_cast(value.dtype, dtype, "same_kind")
    if not numeric and value.dtype != dtype:
      return f"the image has dtype {value.dtype}, not {dtype}"
    if not self.good(value.astype(dtype, copy=False)[None])[0]:
      return "the inputs hold numbers that are not finite"
    return None

  def good(self, values: np.ndarray) -> np.ndarray:
    """bool[n], which hold finite numbers alone."""
    if values.dtype.kind in "iub":
      return np.ones(len(values), bool)
    return np.asarray(np.isfinite(values).all(axis=tuple(range(1, values.ndim))))

  def contradiction(self, info: SourceInfo) -> str | None:
    """Another shape."""
    if info.input_shape is None or tuple(info.input_shape) == self.shape:
      return None
    return f"has images of shape {info.input_shape}, but {self.shape} is declared"


@dataclass(frozen=True)
class RecordSpec:
  """What a well-formed record looks like: a field for each of its names, in a fixed order.

  A record may hold more; it is not read.
  """

  fields: tuple[tuple[str, Field], ...]

  def dtypes(self, info: SourceInfo) -> dict[str, np.dtype]:
    """In which each field is assembled."""
    return {n: info.dtype if f.dtype is None else np.dtype(f.dtype) for n, f in self.fields}

  def known(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """bool[n], of which of n good records something is known that could be learnt."""
    known = [field.known(values[name]) for name, field in self.fields]
    return np.asarray(np.logical_and.reduce(known))

  def nbytes(self, info: SourceInfo) -> int:
    """Of one record."""
    dtypes = self.dtypes(info)
    return sum(math.prod(field.shape) * dtypes[name].itemsize for name, field in self.fields)


def check_records(source: Source, spec: RecordSpec, *, show: bool = True) -> None:
  """Reads every record and refuses the first malformed one.

  For public data, or where the owner of private data asks for it: on private data the message,
  and the mere fact of a crash, tells of a record.

  Args:
    source: the records.
    spec: what they must look like.
    show: whether the message may say what is wrong, and so what the record holds.

  Raises:
    ValueError: names the first bad record and, if `show`, what is wrong with it.
  """
  for start in range(0, len(source), _CHECK_CHUNK):
    indices = np.arange(start, min(start + _CHECK_CHUNK, len(source)))
    *_, problems = read_records(source, indices, spec)
    if problems:
      index = min(problems)
      raise UserError(complaint(source, index, problems[index], show=show))


def complaint(source: Source, index: int, problem: str, *, show: bool) -> str:
  """An error message that names a record; what is wrong with it only if that may be shown."""
  if show:
    return f"record {index} of {source.info.name}: {problem}"
  return (
    f"record {index} of {source.info.name} is malformed, or of no unit; of private data it is not"
    " said how: without data.strict, private/bad_records.json of a run does."
  )


def read_records(
  source: Source, indices: np.ndarray, spec: RecordSpec
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[int, str]]:
  """Reads records: of each field [n, *shape], bool[n], and what is wrong with which.

  A record that cannot be used is False in the second, and all zeros in the first.
  """
  dtypes = spec.dtypes(source.info)
  gathered = source.gather(indices)
  usable, problems = np.ones(len(indices), bool), dict[int, str]()
  if isinstance(gathered, dict):
    if _all_good(gathered, spec, len(indices)):
      return {n: gathered[n].astype(dtypes[n], copy=False) for n in dtypes}, usable, problems
    names = [name for name in dtypes if name in gathered]
    rows = zip(*(gathered[name] for name in names), strict=True)
    gathered = [dict(zip(names, row, strict=True)) for row in rows]
  values = {
    name: aligned_empty((len(indices), *field.shape), dtypes[name]) for name, field in spec.fields
  }
  with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite
    for row, (index, record) in enumerate(zip(indices, gathered, strict=True)):
      problem = _problem(record, spec, dtypes)
      if problem is not None:
        problems[int(index)] = problem
      usable[row] = problem is None and not isinstance(record, RecordError)
      for name, array in values.items():
        array[row] = record[name] if usable[row] else 0  # type: ignore[index]
  return values, usable, problems


def _all_good(gathered: Mapping[str, np.ndarray], spec: RecordSpec, count: int) -> bool:
  return all(
    name in gathered
    and gathered[name].shape == (count, *field.shape)
    and bool(field.good(gathered[name]).all())
    for name, field in spec.fields
  )


def _problem(
  record: Record | RecordError, spec: RecordSpec, dtypes: Mapping[str, np.dtype]
) -> str | None:
  """What is wrong with one record, or None."""
  if isinstance(record, RecordError):
    return None if isinstance(record, Unlabelled) else str(record)
  for name, field in reversed(spec.fields):  # the label first
    if name not in record:
      return f"has no {name}"
    if (problem := field.problem(np.asarray(record[name]), dtypes[name])) is not None:
      return problem
  return None


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """An array, not yet filled, at a multiple of 64 bytes: jax on a CPU uses it without a copy."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)
