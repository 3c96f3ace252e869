"""From records to units: batches of fixed shapes, and masks."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dp_jax.data.records import RecordSpec, aligned_empty, complaint, read_records
from dp_jax.data.sources.source import Source, SourceInfo
from dp_jax.data.unit_ids import Ids
from dp_jax.data.unit_index import UnitIndex
from dp_jax.errors import UserError

Strict = bool | Literal["quiet"]


class UnitLoader:
  """Assembles batches of units in static shapes.

  A unit is one record, or with `unit_ids` all records with one id. A malformed record (label out
  of range, inputs of another shape, undecodable) has zero weight: its `record_mask` is False and
  its fields are zeros, while its unit stays in the batch. So neither a crash nor the shape of a
  batch depends on what a record holds.

  `UnitIndex` says how records are grouped and cut.
  """

  def __init__(
    self,
    source: Source,
    spec: RecordSpec,
    *,
    max_records_per_unit: int = 1,
    strict: Strict = False,
    unit_ids: Ids | None = None,
    units: Ids | None = None,
    missing_values: tuple[str, ...] | None = None,
  ):
    """Groups records into units.

    Args:
      source: the records.
      spec: what they must look like.
      max_records_per_unit: K. A unit with more keeps its first K in the order of the source,
        which depends on that unit alone.
      strict: raise on a malformed record, or one of no unit, instead of giving it zero weight;
        "quiet" does so without saying what is wrong with it, which private data need.
      unit_ids: [num_records], the unit of each record, as `UnitIndex.from_ids` takes them; None
        makes each record its own unit.
      units: [num_units], the ids of all units, those without records too, in the order in which
        they are numbered; None numbers the ids that occur, sorted.
      missing_values: texts that are no id, as `UnitIndex.from_ids` takes them.

    Raises:
      ValueError: if K is below 1, `unit_ids` has another length or holds what is no single id,
        `units` repeats an id, or the source declares what contradicts a field of `spec`; with
        `strict` also if a record is in no unit.
    """
    info = source.info
    if max_records_per_unit < 1:
      raise UserError(f"max_records_per_unit must be at least 1, not {max_records_per_unit}")
    for _, field in spec.fields:
      if (problem := field.contradiction(info)) is not None:
        raise UserError(f"{info.name} {problem}")
    self._source = source
    self._spec = spec
    self._strict = strict
    self._bad_records: dict[int, str] = {}
    self._index = _unit_index(len(source), unit_ids, units, max_records_per_unit, missing_values)
    self._note(self._index.without_unit)

  @property
  def source_info(self) -> SourceInfo:
    """What is known of the source without reading its records."""
    return self._source.info

  @property
  def num_units(self) -> int:
    """How many units there are, well-formed or not."""
    return len(self._index.members)

  @property
  def max_records_per_unit(self) -> int:
    """K, the number of record slots of each unit."""
    return self._index.members.shape[1]

  @property
  def spec(self) -> RecordSpec:
    """What a well-formed record looks like."""
    return self._spec

  @property
  def source(self) -> Source:
    """Where the records come from."""
    return self._source

  @property
  def members(self) -> np.ndarray:
    """int64[num_units, K], the records that each unit uses, filled up with -1."""
    return self._index.members

  @property
  def unit_of_records(self) -> np.ndarray:
    """int64[num_records], the unit of each record, whether used or cut off; -1 for none."""
    return self._index.unit_of_records

  @property
  def num_cut(self) -> int:
    """How many records are not used since their unit has more than K; not public."""
    return self._index.num_cut

  @property
  def look_alike(self) -> tuple[tuple[str, ...], ...]:
    """Groups of ids that are several units and may be one person; not public."""
    return self._index.look_alike

  @property
  def num_respelled(self) -> int:
    """How many ids of records are written in another way than they are compared; not public."""
    return self._index.num_respelled

  @property
  def bad_records(self) -> dict[int, str]:
    """Malformed records met so far: index in the source, and what is wrong.

    Not covered by a privacy guarantee: of private data, keep it under `private/`.
    """
    return dict(self._bad_records)

  def load(self, indices: np.ndarray, size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Loads units and pads them to `size`.

    Args:
      indices: int64[n], units in 0..num_units - 1, n <= size.
      size: how many units the returned arrays have.

    Returns:
      The units: each field of `spec`, [size, K, *shape], and "record_mask" bool[size, K]; and mask
      bool[size], False on padding. Where `record_mask` is False, the fields are zeros. A unit whose
      records are all masked is in the batch all the same.

    Raises:
      ValueError: if there are more than `size` indices or one is out of range; with `strict`
        also on a malformed record, which it names.
    """
    indices = np.asarray(indices, np.int64)
    if indices.ndim != 1 or len(indices) > size:
      raise UserError(f"cannot load indices of shape {indices.shape} into a batch of {size}")
    if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_units):
      raise UserError(
        f"units {indices.min()}..{indices.max()} asked for, but there are {self.num_units}"
      )
    slots = self.max_records_per_unit
    members = np.full((size, slots), -1, np.int64)
    members[: len(indices)] = self._index.members[indices]
    record_mask = members >= 0
    records = members[record_mask]
    values, usable, problems = read_records(self._source, records, self._spec)
    self._note(problems)
    record_mask[record_mask] = usable
    units = {name: _placed(array, members >= 0) for name, array in values.items()}
    units["record_mask"] = record_mask
    return units, np.arange(size) < len(indices)

  def _note(self, problems: dict[int, str]) -> None:
    """Remembers malformed records, or refuses them."""
    if problems and self._strict:
      index = min(problems)
      raise UserError(complaint(self._source, index, problems[index], show=self._strict is True))
    self._bad_records.update(problems)


def _unit_index(
  num_records: int,
  unit_ids: Ids | None,
  units: Ids | None,
  slots: int,
  missing_values: tuple[str, ...] | None,
) -> UnitIndex:
  if unit_ids is None:
    if units is not None:
      raise UserError("units are given without unit_ids; give both, or neither")
    return UnitIndex.of_records(num_records, slots)
  if len(unit_ids) != num_records:
    raise UserError(f"{len(unit_ids)} unit_ids for {num_records} records")
  return UnitIndex.from_ids(unit_ids, slots, units, missing_values)


def _placed(values: np.ndarray, filled: np.ndarray) -> np.ndarray:
  """Values [n, ...] in the places where `filled`, bool[size, K], is True; zeros elsewhere.

  Where all are, which is the case of most microbatches of images, nothing is copied.
  """
  if filled.all():
    return values.reshape(*filled.shape, *values.shape[1:])
  placed = aligned_empty((*filled.shape, *values.shape[1:]), values.dtype)
  placed[~filled] = 0
  placed[filled] = values
  return placed
