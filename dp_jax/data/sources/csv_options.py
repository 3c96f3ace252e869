"""What a configuration says of a table: how its rows become records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from dp_jax.data.sources.images import ImageOptions
from dp_jax.data.sources.options import Context
from dp_jax.errors import UserError

Uncertain = Literal["zeros", "ones", "ignore"]
Blank = Literal["zeros", "ignore"]


@dataclass(frozen=True)
class CsvOptions(ImageOptions):
  """Keys of tables: how rows become records; declared, never read off them.

  Attributes:
    label_columns: one column: its class is the label. Several: each holds 0 or 1, a yes-or-no label
      of its own, and the label is float32[len(label_columns)] with -1 for what is not known.
    class_names: of one label column, the cells of each class, in order. Numbers are compared as
      numbers, so that "1" is "1.0". A cell that is named here is of its class, though it stands
      for no value elsewhere ("None").
    features: columns of numbers that are the input.
    feature_ranges: (low, high) of each, mapped to [-1, 1]; what lies outside is clipped.
    feature_defaults: of each, the value in place of none; left out, the middle of its range.
    missing_indicators: adds for each feature an input that is 1 where it has no value, else 0.
    image_column: in place of features, the column with paths of JPEG or PNG files.
    image_root: the folder that these paths start from and may not lead out of; left out, that of
      the CSV file, and they may lead anywhere.
    uncertain: what a label of -1 stands for (CheXpert's "uncertain"): ignore, zeros or ones.
    blank: what a label without a value stands for: ignore or zeros.
    split_column: the column that names the split of each row.
    eval_fraction: in place of it, the share of units whose rows are data.eval_split; data.seed
      picks them.
  """

  HOLDS = "table"
  READS_TEXT = True
  label_columns: tuple[str, ...] | None = None
  class_names: tuple[str, ...] | None = None
  features: tuple[str, ...] | None = None
  feature_ranges: tuple[tuple[float, ...], ...] | None = None
  feature_defaults: tuple[float, ...] | None = None
  missing_indicators: bool = False
  image_column: str | None = None
  image_root: str | None = None
  uncertain: Uncertain = "ignore"
  blank: Blank = "ignore"
  split_column: str | None = None
  eval_fraction: float | None = None

  @property
  def label_shape(self) -> tuple[int, ...]:
    """Of one label: () of one column, else a vector of yes, no and unknown."""
    count = len(self.label_columns or ())
    return (count,) if count > 1 else ()

  @property
  def decodes(self) -> bool:
    """Whether the records are images."""
    return self.image_column is not None

  @property
  def defaults(self) -> tuple[float, ...] | None:
    """Of each feature the value in place of none; None where there are no features."""
    if self.feature_defaults is not None or not self.features:
      return self.feature_defaults
    return tuple(sum(ends) / 2 for ends in self.feature_ranges or ())

  def inputs(self) -> dict[str, Any]:
    """The columns of numbers, and how they are scaled and filled up."""
    if self.decodes:
      return {}
    return {
      "features": self.features,
      "feature_ranges": self.feature_ranges,
      "feature_defaults": self.defaults,
      "missing_indicators": self.missing_indicators,
    }

  def reading(self) -> dict[str, Any]:
    """Labels and inputs, or how images are decoded."""
    labels = {
      "label_columns": self.label_columns,
      "class_names": self.class_names,
      "image_column": self.image_column,
    }
    return {**labels, **super().reading()}

  def facts(self) -> dict[str, Any]:
    """Columns, ranges, values in place of none, and what labels without a class stand for."""
    named = {name: getattr(self, name) for name in ("features", "image_column", "label_columns")}
    return {
      **{name: value for name, value in named.items() if value is not None},
      "uncertain_labels": self.uncertain,
      "blank_labels": self.blank,
      **(self.inputs() if self.features else {}),
      **self.decoding(),
    }

  def held_out_by(self, seed: int, unit: str) -> list[Any] | None:
    """The share of units that are held out, the seed that picks them, and their column."""
    return None if self.eval_fraction is None else [self.eval_fraction, seed, unit]

  def check(self, context: Context) -> None:
    """Refuses what contradicts itself, once all keys are known."""
    names, columns = self.class_names or (), self.label_columns or ()
    features, ranges = self.features or (), self.feature_ranges or ()
    if bool(features) == self.decodes:
      raise UserError("the csv source needs data.features or data.image_column, one of them")
    if len(ranges) != len(features):
      raise UserError(
        f"data.feature_ranges has {len(ranges)} entries for the {len(features)} of data.features;"
        " give (low, high) for each"
      )
    for name, ends in zip(features, ranges, strict=True):
      if len(ends) != 2 or not ends[0] < ends[1]:
        raise UserError(f"data.feature_ranges: {name} needs (low, high), low < high, not {ends}")
    if self.feature_defaults is not None and len(self.feature_defaults) != len(features):
      raise UserError(
        f"data.feature_defaults={self.feature_defaults} must have one value for each of"
        f" data.features"
      )
    if bool(self.label_shape) == bool(names) or not columns:
      raise UserError(
        f"data.label_columns={columns} needs data.class_names, the cells of each class, if it is"
        " one column, and not if there are several, which are the classes themselves"
      )
    used = [*features, *columns, *filter(None, [self.image_column])]
    twice = {name for name in used if used.count(name) > 1}
    if twice:
      raise UserError(f"the column {min(twice)!r} is used twice as feature or label")
    self._check_classes(names, context)
    self._check_split(context)

  def _check_classes(self, names: tuple[str, ...], context: Context) -> None:
    cells = [_cell(name) for name in names]
    if len({*cells}) < len(cells):
      raise UserError(f"data.class_names={names} names a class twice")
    missing = {_cell(text) for text in context.missing_values or ()}
    both = [name for name, cell in zip(names, cells, strict=True) if cell in missing]
    if both:
      raise UserError(
        f"data.missing_values={context.missing_values} has {min(both)!r}, which data.class_names"
        " says is a class: leave it out of one of them"
      )
    if len(names) > 2 and (self.uncertain, self.blank) != ("ignore", "ignore"):
      raise UserError(
        f"data.uncertain={self.uncertain!r} and data.blank={self.blank!r} are for labels of yes"
        f" and no, not for {len(names)} classes; use ignore"
      )

  def _check_split(self, context: Context) -> None:
    if self.eval_fraction is None:
      return
    if self.split_column is not None or context.unit is None:
      raise UserError(
        f"data.eval_fraction={self.eval_fraction} splits by unit: it needs privacy.unit to name a"
        " column, and no data.split_column"
      )
    if not 0 < self.eval_fraction < 1:
      raise UserError(f"data.eval_fraction={self.eval_fraction} must lie between 0 and 1")


def _cell(text: str) -> str | float:
  """What two texts have in common that the same cells match: "1" and "1.0", "a" and "a "."""
  try:
    number = float(text)
  except ValueError:
    return text.strip()
  return number if math.isfinite(number) else text.strip()
