"""Which records make up which unit: numbering and cutting that no other unit can influence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dp_jax.data.group_columns import to_numbers
from dp_jax.data.sources.absent import ABSENT_IDS, absent
from dp_jax.data.unit_ids import Ids, as_array, look_alike
from dp_jax.errors import UserError

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
    look_alike: groups of ids that are several units and may be one, by case, spaces within them or
      zeros before a number. Not covered either.
    num_respelled: how many ids of records are written in another way than they are compared.
  """

  members: np.ndarray
  unit_of_records: np.ndarray
  without_unit: dict[int, str] = field(default_factory=dict)
  num_cut: int = 0
  look_alike: tuple[tuple[str, ...], ...] = ()
  num_respelled: int = 0

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
    missing_values: tuple[str, ...] | None = None,
  ) -> UnitIndex:
    """Groups records by id, as `dp_jax.data.unit_ids.RULE` compares them.

    Texts lose the spaces around them and are brought to one form of Unicode; "7.0" is "7". But "a"
    and "A", "7" and "07" are two units: whether they are one person has to be decided before.

    Args:
      unit_ids: [num_records], the one unit that each record belongs to. None, NaN, "" and what
        `missing_values` names say that it belongs to none, but for an id that `units` lists. A
        record of two units is refused: whether it goes to one, or to none, has to be decided
        before, by a rule that does not look at others.
      max_records_per_unit: K. A unit with more keeps its first K.
      units: [num_units], the ids of all units in the order in which they are numbered; None numbers
        the ids that occur, sorted.
      missing_values: texts that are no id; None takes `dp_jax.data.sources.absent.ABSENT_IDS`.

    Raises:
      ValueError: if ids are of several types or no single ids, `units` repeats an id, in whatever
        spelling, or there is no unit at all.
    """
    ids, missing, respelled = as_array(unit_ids, "record")
    listed = None if units is None else _listed(units)
    missing = missing | _undeclared(ids, listed, missing_values)
    codes = np.full(len(ids), -1, np.int64)
    if listed is None:
      found, codes[~missing] = np.unique(ids[~missing], return_inverse=True)
      num_units = len(found)
    else:
      num_units = len(listed)
      codes[~missing] = _positions(ids[~missing], listed)
    if not num_units:
      raise UserError("there are no units: no record has a unit id")
    reasons = {int(i): _NO_ID for i in np.flatnonzero(missing)}
    reasons |= {int(i): _NOT_LISTED for i in np.flatnonzero((codes < 0) & ~missing)}
    members, num_cut = _cut(codes, num_units, max_records_per_unit)
    used = ids[~missing]
    alike = look_alike(used) if used.dtype.kind == "U" else ()
    return cls(members, codes, reasons, num_cut, alike, respelled)


def _undeclared(
  ids: np.ndarray, listed: np.ndarray | None, missing_values: tuple[str, ...] | None
) -> np.ndarray:
  """bool[n], which ids stand for none, and are no unit of the list."""
  if ids.dtype.kind != "U":
    numbers = to_numbers(np.array(missing_values or (), np.str_))
    return np.isin(ids, numbers) if len(numbers) else np.zeros(len(ids), bool)
  none = absent(ids, missing_values, ABSENT_IDS)
  return none if listed is None or listed.dtype.kind != "U" else none & ~np.isin(ids, listed)


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
  listed, missing, _ = as_array(units, "entry")
  if missing.any():
    raise UserError(f"entry {int(missing.argmax())} of units is empty")
  differing = len(np.unique(listed))
  if differing != len(listed):
    raise UserError(f"units lists {len(listed)} ids, of which {differing} differ")
  return listed


def _positions(ids: np.ndarray, listed: np.ndarray) -> np.ndarray:
  """Where each id stands on the list, -1 if nowhere."""
  if not len(listed) or not len(ids):
    return np.full(len(ids), -1, np.int64)
  if (ids.dtype.kind in "US") != (listed.dtype.kind in "US"):
    raise UserError(f"the ids of records are {ids.dtype}, those of units {listed.dtype}")
  order = np.argsort(listed)
  at = np.minimum(np.searchsorted(listed, ids, sorter=order), len(listed) - 1)
  found = order[at]
  return np.where(listed[found] == ids, found, -1)
