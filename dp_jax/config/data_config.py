"""The data section of a configuration: where the records are, and what of them is public."""

import dataclasses
from typing import Any, Literal

from dp_jax.config.sections import LEFT_OUT
from dp_jax.data.sources.source import Interpolation, ResizePolicy
from dp_jax.data.sources.table_spec import Blank, Uncertain
from dp_jax.data.views import Augment

Declared = Literal["private", "public"]
_TABLE_KEYS = (
  "label_columns", "features", "feature_ranges", "feature_defaults", "missing_indicators",
  "image_column", "image_root", "uncertain", "blank", "split_column", "eval_fraction",
)  # fmt: skip
# Of these, what an hf source shares.
_HF_KEYS = ("label_columns", "features", "image_column")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where the records come from, and what about them is public.

  Attributes:
    source: digits, rendered_digits, npz, npy, folder, csv, hf or tfds:NAME.
    path: the file or folder of the source, where it has one.
    train_split, eval_split: names of the splits.
    declared: "private" (nothing un-noised leaves private/) or "public" (a benchmark). Left out, it
      is private, or what `facts` say of these very data.
    input_shape, num_classes, value_range: what a well-formed record looks like. Where left out,
      they come from the format of the source and are listed as treated as public.
    resize: how encoded images are brought to input_shape: centre_crop, stretch or none.
    crop_fraction: of centre_crop, how much of the height and width is kept.
    interpolation: bilinear or bicubic, of images that are resized.
    class_names: of a folder source, its class folders in the order of their labels; left out,
      those of the training split, sorted, which add_or_remove_one refuses. Of a csv source, what a
      cell of each class holds.
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
    label_columns: of a csv source. Of several columns each is a yes-or-no label of its own. Of an
      hf source, its one column of labels; image_column or features then name that of the inputs.
    features, feature_ranges: columns of numbers, and (low, high) of each, mapped to [-1, 1].
    feature_defaults: of each feature, the value in place of none; left out, mid-range.
    missing_indicators: adds for each feature an input that says whether it has no value.
    image_column, image_root: in place of features, a column of paths, and where they start. Where
      image_root is set, a path that leads out of it is malformed.
    missing_values: texts that stand for no value, in a cell of a csv source or as the id of a unit,
      in place of the usual ones (NA, N/A, NaN, null, None, "." and the like in whatever case; as an
      id also "unknown" and "missing"), and of a group, where otherwise every text is a value. What
      a declaration names, a class or a unit on the list, is a value whatever it is called.
    uncertain, blank: what a label of -1, or of no value, stands for: ignore, zeros (or ones).
    split_column: the column that names the split of each row.
    eval_fraction: in place of it, the share of units whose rows are data.eval_split.
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
  resize: ResizePolicy = "centre_crop"
  crop_fraction: float = 1.0
  interpolation: Interpolation = "bilinear"
  class_names: tuple[str, ...] | None = None
  num_records: int | None = None
  seed: int = 0
  strict: bool = False
  check: Literal["all", "first"] = "all"
  max_records_per_unit: int | None = None
  units: str | None = None
  groups: tuple[str, ...] | None = None
  group_bins: tuple[tuple[float, ...], ...] | None = None
  label_columns: tuple[str, ...] | None = None
  features: tuple[str, ...] | None = None
  feature_ranges: tuple[tuple[float, ...], ...] | None = None
  feature_defaults: tuple[float, ...] | None = None
  missing_indicators: bool = False
  image_column: str | None = None
  image_root: str | None = None
  missing_values: tuple[str, ...] | None = None
  uncertain: Uncertain = "ignore"
  blank: Blank = "ignore"
  split_column: str | None = None
  eval_fraction: float | None = None
  augment: Augment = "none"
  views: int = 1
  min_crop_area: float = 0.08
  workers: int | None = None
  prefetch: int | None = None


def data_checks(data: DataConfig, unit: str, limit: int) -> list[tuple[bool, str, Any, str]]:
  """Checks of what the types do not say: (holds, key, value, what it must be).

  Args:
    data: the section.
    unit: privacy.unit.
    limit: the resolved K.
  """
  of_records = unit == "record"
  shown = data.max_records_per_unit
  elsewhere = [
    name for name in _TABLE_KEYS
    if data.source != "csv" and getattr(data, name) != getattr(DataConfig, name)
    and not (data.source == "hf" and name in _HF_KEYS)
  ]  # fmt: skip
  one_each = len(data.label_columns or ()) < 2 and len(data.features or ()) < 2
  return [
    (not elsewhere, f"data.{min(elsewhere, default='')}",
     getattr(data, min(elsewhere, default="source")), "is for the source csv"),
    (data.class_names is None or data.source in ("folder", "csv"), "data.class_names",
     data.class_names, "is for the sources folder and csv: others name their classes themselves"),
    (data.source != "hf" or one_each, "data.features", data.features,
     "and data.label_columns of an hf source must name one column each"),
    (data.min_crop_area == DataConfig.min_crop_area or data.augment == "random_resized_crop",
     "data.min_crop_area", data.min_crop_area, f"is of random_resized_crop, and"
     f" data.augment={data.augment!r} does not use it: leave it out"),
    (data.crop_fraction == DataConfig.crop_fraction or data.resize == "centre_crop",
     "data.crop_fraction", data.crop_fraction, f"is of centre_crop, and data.resize={data.resize!r}"
     " does not use it: leave it out"),
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
