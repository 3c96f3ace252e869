"""From records to units: fixed shapes, masks, and what happens to a malformed record."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dp_jax.data.source import Record, RecordError, Source, SourceInfo, Unlabelled
from dp_jax.data.unit_index import Ids, UnitIndex

# How many records `check_records` asks for at once.
_CHECK_CHUNK = 1024
_ALIGNMENT = 64


@dataclass(frozen=True)
class RecordSpec:
  """What a well-formed record looks like; declared, never read off the records.

  Attributes:
    input_shape: (height, width, channels) of an image, (features,) of a vector.
    num_classes: labels are 0..num_classes - 1.
    value_range: the pixel values that the model maps to its input range. A value outside it is
      no error (clipping bounds what it can do), and neither is one that is not finite.
    multilabel: the label is not one integer but a vector of num_classes: 1 for yes, 0 for no, -1
      for not known.
  """

  input_shape: tuple[int, ...]
  num_classes: int
  value_range: tuple[float, float]
  multilabel: bool = False

  def __post_init__(self) -> None:
    """Refuses a spec that no record could meet."""
    if len(self.input_shape) not in (1, 3) or min(self.input_shape) < 1:
      raise ValueError(
        f"input_shape must be (height, width, channels) or (features,), not {self.input_shape}"
      )
    if self.num_classes < 1:
      raise ValueError(f"num_classes must be at least 1, not {self.num_classes}")
    if not self.value_range[0] < self.value_range[1]:
      raise ValueError(f"value_range must be (low, high) with low < high, not {self.value_range}")

  def no_labels(self, *shape: int) -> np.ndarray:
    """Labels of padding: int32[*shape], or float32[*shape, num_classes] if multilabel."""
    if self.multilabel:
      return np.zeros((*shape, self.num_classes), np.float32)
    return np.zeros(shape, np.int32)

  def label_problem(self, label: np.ndarray) -> str | None:
    """What is wrong with one label, or None."""
    if self.multilabel:
      if label.shape != (self.num_classes,) or label.dtype.kind not in "iuf":
        return f"the label must be {self.num_classes} numbers, not {label.dtype} of {label.shape}"
      return None if np.isin(label, (0, 1, -1)).all() else "a label is neither 0, 1 nor -1"
    if label.shape != () or label.dtype.kind not in "ui":
      return f"the label must be one integer, not {label.dtype} of shape {label.shape}"
    if not 0 <= label < self.num_classes:
      return f"label {label} is outside 0..{self.num_classes - 1}"
    return None

  def good_labels(self, labels: np.ndarray) -> np.ndarray:
    """bool[n], which of n stacked labels have nothing wrong in their values."""
    if self.multilabel:
      return np.asarray(np.isin(labels, (0, 1, -1)).all(axis=1))
    return np.asarray((labels >= 0) & (labels < self.num_classes))


def check_records(source: Source, spec: RecordSpec) -> None:
  """Reads every record and refuses the first malformed one.

  For public data, or where the owner of private data asks for it: on private data the message,
  and the mere fact of a crash, tells of a record.

  Args:
    source: the records.
    spec: what they must look like.

  Raises:
    ValueError: names the first bad record and what is wrong with it.
  """
  for start in range(0, len(source), _CHECK_CHUNK):
    indices = np.arange(start, min(start + _CHECK_CHUNK, len(source)))
    *_, problems = _read(source, indices, spec)
    if problems:
      index = min(problems)
      raise ValueError(_complaint(source, index, problems[index]))


class UnitLoader:
  """Assembles batches of units in static shapes.

  A unit is one record, or with `unit_ids` all records with one id. A malformed record (label out
  of range, another image shape, undecodable) has zero weight: its `record_mask` is False and its
  pixels are zeros, while its unit stays in the batch. So neither a crash nor the shape of a batch
  depends on what a record holds.

  `UnitIndex` says how records are grouped and cut.
  """

  def __init__(
    self,
    source: Source,
    spec: RecordSpec,
    *,
    max_records_per_unit: int = 1,
    strict: bool = False,
    unit_ids: Ids | None = None,
    units: Ids | None = None,
  ):
    """Groups records into units.

    Args:
      source: the records.
      spec: what they must look like.
      max_records_per_unit: K. A unit with more keeps its first K in the order of the source,
        which depends on that unit alone.
      strict: raise on a malformed record, or one of no unit, instead of giving it zero weight.
      unit_ids: [num_records], the unit of each record, as `UnitIndex.from_ids` takes them; None
        makes each record its own unit.
      units: [num_units], the ids of all units, those without records too, in the order in which
        they are numbered; None numbers the ids that occur, sorted.

    Raises:
      ValueError: if K is below 1, `unit_ids` has another length or holds what is no single id,
        `units` repeats an id, or the source declares a shape, dtype or number of classes that
        contradicts `spec`; with `strict` also if a record is in no unit.
    """
    info = source.info
    if max_records_per_unit < 1:
      raise ValueError(f"max_records_per_unit must be at least 1, not {max_records_per_unit}")
    if info.input_shape is not None and tuple(info.input_shape) != tuple(spec.input_shape):
      raise ValueError(
        f"{info.name} has images of shape {info.input_shape}, but {spec.input_shape} is declared"
      )
    if info.num_classes is not None and info.num_classes != spec.num_classes:
      raise ValueError(
        f"{info.name} has {info.num_classes} classes, but {spec.num_classes} are declared"
      )
    if info.multilabel != spec.multilabel:
      kinds = ("one label a record", "several labels a record")
      raise ValueError(
        f"{info.name} has {kinds[info.multilabel]}, but {kinds[spec.multilabel]} are declared"
      )
    self._source = source
    self._spec = spec
    self._strict = strict
    self._bad_records: dict[int, str] = {}
    self._index = _unit_index(len(source), unit_ids, units, max_records_per_unit)
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
      The units: "inputs" [size, K, *input_shape] in the dtype that the source declares, "label"
      int32[size, K] (float32[size, K, num_classes] if multilabel), "record_mask" bool[size, K];
      and mask bool[size], False on padding. Where `record_mask` is False, inputs and label are
      zeros. A unit whose records are all masked is in the batch all the same.

    Raises:
      ValueError: if there are more than `size` indices or one is out of range; with `strict`
        also on a malformed record, which it names.
    """
    indices = np.asarray(indices, np.int64)
    if indices.ndim != 1 or len(indices) > size:
      raise ValueError(f"cannot load indices of shape {indices.shape} into a batch of {size}")
    if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_units):
      raise ValueError(
        f"units {indices.min()}..{indices.max()} asked for, but there are {self.num_units}"
      )
    slots = self.max_records_per_unit
    members = np.full((size, slots), -1, np.int64)
    members[: len(indices)] = self._index.members[indices]
    record_mask = members >= 0
    records = members[record_mask]
    images, labels, usable, problems = _read(self._source, records, self._spec)
    self._note(problems)
    record_mask[record_mask] = usable
    units = {
      "inputs": _placed(images, members >= 0),
      "label": _placed(labels, members >= 0),
      "record_mask": record_mask,
    }
    return units, np.arange(size) < len(indices)

  def _note(self, problems: dict[int, str]) -> None:
    """Remembers malformed records, or refuses them."""
    if problems and self._strict:
      index = min(problems)
      raise ValueError(_complaint(self._source, index, problems[index]))
    self._bad_records.update(problems)


def _unit_index(num_records: int, unit_ids: Ids | None, units: Ids | None, slots: int) -> UnitIndex:
  if unit_ids is None:
    if units is not None:
      raise ValueError("units are given without unit_ids; give both, or neither")
    return UnitIndex.of_records(num_records, slots)
  if len(unit_ids) != num_records:
    raise ValueError(f"{len(unit_ids)} unit_ids for {num_records} records")
  return UnitIndex.from_ids(unit_ids, slots, units)


def _placed(values: np.ndarray, filled: np.ndarray) -> np.ndarray:
  """Values [n, ...] in the places where `filled`, bool[size, K], is True; zeros elsewhere.

  Where all are, which is the case of most microbatches of images, nothing is copied.
  """
  if filled.all():
    return values.reshape(*filled.shape, *values.shape[1:])
  placed = _zeros((*filled.shape, *values.shape[1:]), values.dtype)
  placed[filled] = values
  return placed


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Zeros that begin at a multiple of 64 bytes: jax on a CPU then uses them without a copy."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.zeros(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


def _complaint(source: Source, index: int, problem: str) -> str:
  return f"record {index} of {source.info.name}: {problem}"


def _read(
  source: Source, indices: np.ndarray, spec: RecordSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, str]]:
  """Reads records: inputs [n, *input_shape], labels [n, ...], bool[n] and what is wrong with which.

  A record that cannot be used is False in the third, and all zeros in the others.
  """
  gathered = source.gather(indices)
  dtype = np.dtype(source.info.input_dtype)
  images = _zeros((len(indices), *spec.input_shape), dtype)
  labels, usable = spec.no_labels(len(indices)), np.ones(len(indices), bool)
  problems: dict[int, str] = {}
  if isinstance(gathered, dict):
    alike = gathered["label"].shape == labels.shape and gathered["inputs"].shape == images.shape
    if alike and spec.good_labels(gathered["label"]).all():
      return (
        gathered["inputs"].astype(dtype, copy=False), gathered["label"].astype(labels.dtype),
        usable, {},
      )  # fmt: skip
    gathered = [
      {"inputs": image, "label": label}
      for image, label in zip(gathered["inputs"], gathered["label"], strict=True)
    ]
  with np.errstate(over="ignore", invalid="ignore"):  # what does not fit becomes infinite
    for row, (index, record) in enumerate(zip(indices, gathered, strict=True)):
      problem = _problem(record, spec, dtype)
      usable[row] = problem is None and not isinstance(record, RecordError)
      if problem is not None:
        problems[int(index)] = problem
      elif not isinstance(record, RecordError):
        images[row] = record["inputs"]
        labels[row] = record["label"]
  return images, labels, usable, problems


def _problem(record: Record | RecordError, spec: RecordSpec, dtype: np.dtype) -> str | None:
  """What is wrong with one record, or None."""
  if isinstance(record, RecordError):
    return None if isinstance(record, Unlabelled) else str(record)
  image = np.asarray(record["inputs"])
  problem = spec.label_problem(np.asarray(record["label"]))
  if problem is not None:
    return problem
  if image.shape != tuple(spec.input_shape):
    return f"the image has shape {image.shape}, not {tuple(spec.input_shape)}"
  if image.dtype.kind not in "uif" or not np.can_cast(image.dtype, dtype, "same_kind"):
    return f"the image has dtype {image.dtype}, not {dtype}"
  return None
