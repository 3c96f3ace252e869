"""Which records make up which unit: numbering and cutting that no other unit can influence."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

# One id a record, all strings or all numbers; an array, or a sequence of Python values.
Ids = Sequence[Hashable] | np.ndarray

_NO_ID = "has no unit id, so it belongs to no unit"
_NOT_LISTED = "belongs to no unit on the list"


@dataclass(frozen=True)
class UnitIndex:
  """Records grouped into units.

  What a unit holds moves no other unit. Units are numbered by their ids, in sorted order or in that
  of a list, never by where their records stand; and a unit is cut to K by the order of its own
  records. So a unit may lose, gain or reorder its records, and every other unit keeps its index
  among the same units and the records that it had. A unit that loses all of them keeps its place
  only if the list names it: that is the blank unit of zero_out, under which the list of units is
  public. Without a list it is gone, N is one less, and the units after it move up by one in the
  same order, as under add_or_remove_one. All this holds for a source that keeps the records of a
  unit in an order of their own; one that shuffles all records together lets others decide the cut.

  A record without an id, or of a unit that the list lacks, is in no unit, so that nobody's data are
  used outside a unit that protects them, and no other unit notices.

  Attributes:
    members: int64[num_units, K], the records of each unit, filled up with -1.
    unit_of_records: int64[num_records], the unit of each record, used or cut off; -1 for none.
    without_unit: the records in no unit, and why. Not covered by a privacy guarantee.
    num_cut: how many records were cut off because their unit has more than K. Not covered either.
  """

  members: np.ndarray
  unit_of_records: np.ndarray
  without_unit: dict[int, str] = field(default_factory=dict)
  num_cut: int = 0

  @classmethod
  def of_records(cls, num_records: int, max_records_per_unit: int) -> UnitIndex:
    """Each record is its own unit."""
    members = np.full((num_records, max_records_per_unit), -1, np.int64)
    members[:, 0] = np.arange(num_records)
    return cls(members, np.arange(num_records))

  @classmethod
  def from_ids(
    cls,
    unit_ids: Ids,
    max_records_per_unit: int,
    units: Ids | None = None,
  ) -> UnitIndex:
    """Groups records by id; ids are compared as they are: "7" and "07" are two units.

    Args:
      unit_ids: [num_records], the one unit that each record belongs to. None, NaN and "" say that
        it belongs to none. A record of two units is refused: whether it goes to one, or to none,
        has to be decided before, by a rule that does not look at others.
      max_records_per_unit: K. A unit with more keeps its first K.
      units: [num_units], the ids of all units in the order in which they are numbered; None numbers
        the ids that occur, sorted.

    Raises:
      ValueError: if ids are of several types or no single ids, `units` repeats an id, or there is
        no unit at all.
    """
    ids, missing = _as_array(unit_ids, "record")
    listed = None if units is None else _listed(units)
    codes = np.full(len(ids), -1, np.int64)
    if listed is None:
      found, codes[~missing] = np.unique(ids[~missing], return_inverse=True)
      num_units = len(found)
    else:
      num_units = len(listed)
      codes[~missing] = _positions(ids[~missing], listed)
    if not num_units:
      raise ValueError("there are no units: no record has a unit id")
    reasons = {int(i): _NO_ID for i in np.flatnonzero(missing)}
    reasons |= {int(i): _NOT_LISTED for i in np.flatnonzero((codes < 0) & ~missing)}
    members, num_cut = _cut(codes, num_units, max_records_per_unit)
    return cls(members, codes, reasons, num_cut)


def _cut(codes: np.ndarray, num_units: int, slots: int) -> tuple[np.ndarray, int]:
  """The first `slots` records of each unit, and how many records are beyond them."""
  order = np.argsort(codes, kind="stable")  # by unit, and within one in the order of the source
  order = order[np.searchsorted(codes[order], 0) :]
  counts = np.bincount(codes[order], minlength=num_units)
  starts = np.cumsum(counts) - counts
  ranks = np.arange(len(order)) - starts[codes[order]]
  kept = ranks < slots
  members = np.full((num_units, slots), -1, np.int64)
  members[codes[order[kept]], ranks[kept]] = order[kept]
  return members, int(np.sum(~kept))


def _listed(units: Ids) -> np.ndarray:
  listed, missing = _as_array(units, "entry")
  if missing.any():
    raise ValueError(f"entry {int(missing.argmax())} of units is empty")
  differing = len(np.unique(listed))
  if differing != len(listed):
    raise ValueError(f"units lists {len(listed)} ids, of which {differing} differ")
  return listed


def _positions(ids: np.ndarray, listed: np.ndarray) -> np.ndarray:
  """Where each id stands on the list, -1 if nowhere."""
  if not len(listed) or not len(ids):
    return np.full(len(ids), -1, np.int64)
  if (ids.dtype.kind in "US") != (listed.dtype.kind in "US"):
    raise ValueError(f"the ids of records are {ids.dtype}, those of units {listed.dtype}")
  order = np.argsort(listed)
  at = np.minimum(np.searchsorted(listed, ids, sorter=order), len(listed) - 1)
  found = order[at]
  return np.where(listed[found] == ids, found, -1)


def _as_array(ids: Ids, owner: str) -> tuple[np.ndarray, np.ndarray]:
  """Ids as an array of strings or numbers, and which of them are missing."""
  array = ids if isinstance(ids, np.ndarray) and ids.dtype.kind != "O" else _typed(ids, owner)
  if array.ndim != 1 or array.dtype.kind not in "USbiuf":
    raise ValueError(
      f"unit ids must be one number or string for each {owner}, not {array.dtype} of shape"
      f" {array.shape}"
    )
  if array.dtype.kind == "f":
    return array, np.isnan(array)
  if array.dtype.kind in "US":
    return array, array == np.zeros((), array.dtype)
  return array, np.zeros(len(array), bool)


def _typed(ids: Iterable[object], owner: str) -> np.ndarray:
  """Python values as an array of the one type that they have; None becomes "" or NaN."""
  values = list(ids)
  kinds = {_kind(cls) for cls in set(map(type, values))}
  if "other" in kinds:
    bad = next(i for i, value in enumerate(values) if _kind(type(value)) == "other")
    raise ValueError(
      f"{owner} {bad} has the unit id {values[bad]!r}; give one number or string: a record that"
      " belongs to several units has to be assigned to one or left out before"
    )
  nan = {i for i, v in enumerate(values) if v is None or v != v} if kinds - {"text"} else set()
  used = {_kind(type(v)) for i, v in enumerate(values) if i not in nan} if nan else kinds
  if len(used) > 1:
    raise ValueError(f"unit ids mix types that have no order ({', '.join(sorted(used))})")
  if used == {"number"}:
    return _numbers(values, nan)
  blank = b"" if used == {"bytes"} else ""
  return np.array([blank if i in nan else v for i, v in enumerate(values)])


def _numbers(values: list, nan: set[int]) -> np.ndarray:
  array = np.array([0 if i in nan else v for i, v in enumerate(values)])
  if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and np.abs(array).max() >= 2**53):
    raise ValueError("unit ids are numbers too large to tell apart; give them as strings")
  if nan:
    array = array.astype(np.float64)
    array[list(nan)] = np.nan
  return array


def _kind(cls: type) -> str:
  if issubclass(cls, str):
    return "text"
  if issubclass(cls, bytes):
    return "bytes"
  if issubclass(cls, type(None)):
    return "none"
  return "number" if issubclass(cls, numbers.Real | np.bool_) else "other"
