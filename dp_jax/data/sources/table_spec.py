"""What a configuration says of a table: how its rows become records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dp_jax.errors import UserError

Uncertain = Literal["zeros", "ones", "ignore"]
Blank = Literal["zeros", "ignore"]


@dataclass(frozen=True)
class TableSpec:
  """How rows become records; declared, never read off them.

  Attributes:
    label_columns: one column: its class is the label. Several: each holds 0 or 1, and the label is
      float32[len(label_columns)] with -1 for what is not known.
    class_names: of one label column, the cells of each class, in order. Numbers are compared as
      numbers, so that "1" is "1.0". A cell that is named here is of its class, though it stands
      for no value elsewhere ("None").
    features: columns of numbers that are the input.
    feature_ranges: (low, high) of each, mapped to [-1, 1]; what lies outside is clipped.
    feature_defaults: of each, the value in place of none; None takes the middle of its range.
    missing_indicators: adds for each feature an input that is 1 where it has no value, else 0.
    image_column: in place of features, the column with paths of JPEG or PNG files.
    image_root: the folder that these paths start from and may not lead out of; None means that of
      the CSV file, and they may lead anywhere.
    uncertain: what a label of -1 stands for (CheXpert's "uncertain").
    blank: what a label without a value stands for.
    split_column: the column that names the split of each row.
    eval_fraction: in place of it, the share of units whose rows are the evaluation split.
    eval_split: the name of that split; any other is the rest.
    unit_column: the column of units, by which eval_fraction splits.
    seed: picks that share.
    missing_values: the cells that hold no value, in every column, in place of the usual ones of
      `dp_jax.data.sources.absent`; an empty one never does.
    labelled: False reads no labels, for predictions on people of whom none are known: they are 0,
      or not known where there are several.
  """

  label_columns: tuple[str, ...]
  class_names: tuple[str, ...] = ()
  features: tuple[str, ...] = ()
  feature_ranges: tuple[tuple[float, ...], ...] = ()
  feature_defaults: tuple[float, ...] | None = None
  missing_indicators: bool = False
  image_column: str | None = None
  image_root: str | None = None
  uncertain: Uncertain = "ignore"
  blank: Blank = "ignore"
  split_column: str | None = None
  eval_fraction: float | None = None
  eval_split: str = "test"
  unit_column: str | None = None
  seed: int = 0
  labelled: bool = True
  missing_values: tuple[str, ...] | None = None

  def __post_init__(self) -> None:
    """Refuses what contradicts itself, naming keys of the data section."""
    if bool(self.features) == (self.image_column is not None):
      raise UserError("the csv source needs data.features or data.image_column, one of them")
    if len(self.feature_ranges) != len(self.features):
      raise UserError(
        f"data.feature_ranges has {len(self.feature_ranges)} entries for the"
        f" {len(self.features)} of data.features; give (low, high) for each"
      )
    for name, ends in zip(self.features, self.feature_ranges, strict=True):
      if len(ends) != 2 or not ends[0] < ends[1]:
        raise UserError(f"data.feature_ranges: {name} needs (low, high), low < high, not {ends}")
    if self.feature_defaults is not None and len(self.feature_defaults) != len(self.features):
      raise UserError(
        f"data.feature_defaults={self.feature_defaults} must have one value for each of"
        f" data.features"
      )
    if bool(self.label_shape) == bool(self.class_names) or not self.label_columns:
      raise UserError(
        f"data.label_columns={self.label_columns} needs data.class_names, the cells of each class,"
        " if it is one column, and not if there are several, which are the classes themselves"
      )
    if len(set(self.class_names)) < len(self.class_names):
      raise UserError(f"data.class_names={self.class_names} names a class twice")
    both = {*self.class_names} & {*(self.missing_values or ())}
    if both:
      raise UserError(
        f"data.missing_values={self.missing_values} has {min(both)!r}, which data.class_names says"
        " is a class: leave it out of one of them"
      )
    if len(self.class_names) > 2 and (self.uncertain, self.blank) != ("ignore", "ignore"):
      raise UserError(
        f"data.uncertain={self.uncertain!r} and data.blank={self.blank!r} are for labels of yes"
        f" and no, not for {len(self.class_names)} classes; use ignore"
      )
    columns = [*self.features, *self.label_columns, *filter(None, [self.image_column])]
    twice = {name for name in columns if columns.count(name) > 1}
    if twice:
      raise UserError(f"the column {min(twice)!r} is used twice as feature or label")
    self._check_split()

  def _check_split(self) -> None:
    if self.eval_fraction is None:
      return
    if self.split_column is not None or self.unit_column is None:
      raise UserError(
        f"data.eval_fraction={self.eval_fraction} splits by unit: it needs privacy.unit to name a"
        " column, and no data.split_column"
      )
    if not 0 < self.eval_fraction < 1:
      raise UserError(f"data.eval_fraction={self.eval_fraction} must lie between 0 and 1")

  @property
  def label_shape(self) -> tuple[int, ...]:
    """Of one label: () of one column, else a vector of yes, no and unknown."""
    return (len(self.label_columns),) if len(self.label_columns) > 1 else ()
