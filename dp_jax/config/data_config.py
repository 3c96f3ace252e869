"""The data section of a configuration: where the records are, and what of them is public."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from dp_jax.config.sections import LEFT_OUT, from_mapping, plain, refuse_unknown
from dp_jax.data.sources.opening import SOURCES, options_of
from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.views import Augment
from dp_jax.errors import UserError

Declared = Literal["private", "public"]


@dataclasses.dataclass(frozen=True)
class CommonData:
  """The keys that all sources share: where the records come from, and what of them is public.

  Attributes:
    source: digits, rendered_digits, npz, npy, folder, csv, hf, tfds:NAME, or for a source of other
      people package.module:function.
    path: the file or folder of the source, where it has one.
    train_split, eval_split: names of the splits.
    declared: "private" (nothing un-noised leaves private/) or "public" (a benchmark). Left out, it
      is private, or what `facts` say of these very data.
    input_shape, num_classes, value_range: what a well-formed record looks like. Where left out,
      they come from the format of the source and are listed as treated as public.
    num_records: cuts the source, or says how many to render. A cut is refused where a record that
      goes would let the next one in: with units, and under add_or_remove_one.
    seed: picks the split or the drawings of sources that have a choice; never used for privacy.
    strict: on private data, stop at a malformed record, which reveals that it exists. Public data
      is always strict.
    check: where records are in files and malformed ones stop a run (public data, or strict): "all"
      reads each before the budget is reserved, which takes as long as one pass over them; "first"
      reads the first of each split, and a bad one that a later step meets costs what was reserved.
    max_records_per_unit: K, the most records of a unit that are used. Left out, it is 1 where each
      record is its own unit, and DEFAULT_RECORDS_PER_UNIT where privacy.unit names a column.
    units: a file that lists the ids of all units, one a line, in the order in which they are
      numbered. It is public. Without it the ids that occur are treated as public.
    groups: columns whose values are the subgroups of an evaluation.
    group_bins: for each of data.groups the cut points of its bands; () for values as they are.
    missing_values: texts that stand for no value, in a cell of a csv source or as the id of a unit,
      in place of the usual ones (NA, N/A, NaN, null, None, "." and the like in whatever case; as an
      id also "unknown" and "missing"), and of a group, where otherwise every text is a value. What
      a declaration names, a class or a unit on the list, is a value whatever it is called.
    augment: how a step varies records: none, pad_mirror_crop_flip (small images) or
      random_resized_crop (large ones). Evaluation sees records as they are.
    views: K', how many variants of each record a step sees; they are clipped as one.
    min_crop_area: of random_resized_crop, the smallest share of an image that is kept.
    workers: threads that load microbatches ahead of the device; 0 loads each when it is needed.
      Left out, one a core where records are read from files, none where they are in memory.
    prefetch: how many microbatches may wait or be under way; left out, two more than workers.
  """

  source: str = ""
  path: str | None = None
  train_split: str = "train"
  eval_split: str = "test"
  declared: Declared = dataclasses.field(default="private", metadata={LEFT_OUT: True})
  input_shape: tuple[int, ...] | None = None
  num_classes: int | None = None
  value_range: tuple[float, ...] | None = None
  num_records: int | None = None
  seed: int = 0
  strict: bool = False
  check: Literal["all", "first"] = "all"
  max_records_per_unit: int | None = None
  units: str | None = None
  groups: tuple[str, ...] | None = None
  group_bins: tuple[tuple[float, ...], ...] | None = None
  missing_values: tuple[str, ...] | None = None
  augment: Augment = "none"
  views: int = 1
  min_crop_area: float = 0.08
  workers: int | None = None
  prefetch: int | None = None


@dataclasses.dataclass(frozen=True)
class DataConfig(CommonData):
  """The data section: common keys, and those of its source.

  Files and flags have both in the one section: data.features is `options.features` here.

  Attributes:
    options: the keys that are the source's own, as its class documents them.
  """

  options: SourceOptions = dataclasses.field(default_factory=SourceOptions)

  @classmethod
  @functools.cache
  def keys(cls) -> type:
    """A dataclass with all keys of the section: the common ones, and those of every source."""
    bases: tuple[type, ...] = (CommonData, *SOURCES.values())
    return dataclasses.make_dataclass("DataKeys", (), bases=bases, frozen=True)

  @classmethod
  def from_section(cls, values: Mapping[str, Any], where: str) -> "DataConfig":
    """Builds the section, and the options of its source, from the keys of a file.

    Raises:
      UserError: for an unknown key or source, or a value of a wrong type.
    """
    refuse_unknown(values, vars(cls.keys()()), where)
    source = values.get("source", cls.source)
    if not isinstance(source, str) or not source:
      raise UserError(f"data.source={source!r} must name a source.")
    kind = options_of(source)
    own, common = _names(kind), _names(CommonData)
    options = from_mapping(kind, {key: values[key] for key in values if key in own}, where)
    section = from_mapping(cls, {key: values[key] for key in values if key in common}, where)
    return dataclasses.replace(section, options=options)

  def context(
    self, unit: str, shapes: Mapping[str, Any], class_names: Any = None, labelled: bool = True
  ) -> Context:
    """What a source gets to know beside its own options.

    Args:
      unit: privacy.unit.
      shapes: what input_shape, num_classes and value_range are where the section leaves them out.
      class_names: of another split, or of a model.
      labelled: False does without the labels.
    """
    shape, ends = (
      getattr(self, name) or shapes.get(name) for name in ("input_shape", "value_range")
    )
    return Context(
      source=self.source, path=self.path, seed=self.seed, num_records=self.num_records,
      input_shape=shape and tuple(shape), value_range=ends and tuple(ends),
      class_names=class_names, eval_split=self.eval_split, unit=None if unit == "record" else unit,
      missing_values=self.missing_values, labelled=labelled,
    )  # fmt: skip

  def refuse_others(self, given: Mapping[str, Any]) -> None:
    """Refuses keys of other sources among those `given` in a file.

    At its default one may be there, as in files that start from all keys.

    Raises:
      UserError: names the key and the sources that have it.
    """
    defaults = self.keys()()
    for key in sorted({*given} - _names(self) - _names(self.options)):
      if plain(given[key]) != plain(getattr(defaults, key)):
        owners = [name for name, each in SOURCES.items() if key in _names(each)]
        raise UserError(f"data.{key}={given[key]!r} is for the source {' or '.join(owners)}.")

  def to_dict(self) -> dict[str, Any]:
    """The keys of the section as `from_section` reads them; none of other sources."""
    content: dict[str, Any] = dataclasses.asdict(self)
    return plain(content | content.pop("options"))


def _names(section: Any) -> set[str]:
  return {each.name for each in dataclasses.fields(section)}


def data_checks(data: DataConfig, unit: str, limit: int) -> list[tuple[bool, str, Any, str]]:
  """Checks of what the types do not say: (holds, key, value, what it must be).

  Args:
    data: the section.
    unit: privacy.unit.
    limit: the resolved K.
  """
  of_records = unit == "record"
  shown = data.max_records_per_unit
  return [
    (data.path is None or data.options.READS_PATH, "data.path", data.path,
     f"is not read by the source {data.source}: set data.source to what that file is, or leave it"
     " out"),
    (data.min_crop_area == DataConfig.min_crop_area or data.augment == "random_resized_crop",
     "data.min_crop_area", data.min_crop_area, f"is of random_resized_crop, and"
     f" data.augment={data.augment!r} does not use it: leave it out"),
    ((data.workers or 0) >= 0, "data.workers", data.workers, "must not be negative"),
    (data.prefetch is None or data.prefetch >= 1, "data.prefetch", data.prefetch,
     "must be at least 1"),
    (bool(unit), "privacy.unit", unit, "must name a column"),
    (limit >= 1, "data.max_records_per_unit", shown, "must be at least 1"),
    (not of_records or limit == 1, "data.max_records_per_unit", shown,
     "must be 1 where each record is its own unit: set privacy.unit to the column of the units"),
    (not of_records or data.units is None, "data.units", data.units,
     "lists units, but each record is its own: set privacy.unit to the column of the units"),
    # Cutting all records together lets a unit decide which records of others are used.
    (of_records or data.num_records is None, "data.num_records", data.num_records,
     f"has no place where units are grouped by {unit!r}: whose records are within the limit would"
     " depend on those of others"),
    (data.group_bins is None or len(data.group_bins) == len(data.groups or ()), "data.group_bins",
     data.group_bins, "must have one entry for each of data.groups, () for values as they are"),
  ]  # fmt: skip
