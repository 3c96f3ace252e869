"""Groups of records: the values of columns, their intersections, and what may be said of each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from dp_jax.errors import UserError
from dp_jax.evaluation.predictions import PredictionTable

# Groups below either say too little to be ranked: they are shown, and marked.
SMALL_UNITS = 30
SMALL_EVENTS = 10
# More groups than this are a mistake, such as a column of names or of numbers without cut points.
MAX_GROUPS = 500
# The column that every table of one label has.
CLASS = "class"

Status = Literal["shown", "small", "suppressed"]


@dataclass(frozen=True)
class Partition:
  """Records by the values of some columns; of no column, all in one group.

  Attributes:
    columns: their names.
    groups: the values of each group, in the order of `columns`.
    codes: int64[n], the group of each record.
  """

  columns: tuple[str, ...]
  groups: tuple[tuple[str, ...], ...]
  codes: np.ndarray

  def names(self) -> list[str]:
    """Each group for people: "sex female, race white"."""
    return [
      ", ".join(f"{c} {v}" for c, v in zip(self.columns, group, strict=True)) or "all"
      for group in self.groups
    ]


def partitions(
  table: PredictionTable, columns: Sequence[str], class_names: Sequence[str] = ()
) -> list[Partition]:
  """All records, the groups of each column, and those of every combination of columns.

  Args:
    table: the predictions.
    columns: names of its groups, or "class", the true class.
    class_names: of the classes, for "class".

  Raises:
    ValueError: if a column is not there, named twice, or there are too many groups.
  """
  there = {**table.groups}
  if not table.has_several_labels:
    there[CLASS] = _class_values(table, class_names)
  for name in columns:
    if name not in there:
      raise UserError(
        f"there is no group column {name!r}; the predictions have {', '.join(sorted(there))}."
        " Columns of the data are kept if data.groups names them."
      )
  if len(set(columns)) < len(columns):
    raise UserError(f"--groups={','.join(columns)} names a column twice.")
  chosen = [c for size in range(len(columns) + 1) for c in combinations(columns, size)]
  result = [_partition(there, names, len(table.label)) for names in chosen]
  total = sum(len(part.groups) for part in result)
  if total > MAX_GROUPS:
    raise UserError(
      f"the columns {', '.join(columns)} and their combinations make more than {MAX_GROUPS}"
      " groups: name fewer columns, or give numbers cut points with data.group_bins."
    )
  return result


def unit_counts(parts: Sequence[Partition], units: np.ndarray) -> np.ndarray:
  """int64[groups of all partitions]: how many units have a record in each."""
  counts, stride = [], units.max(initial=0) + 1
  for part in parts:
    pairs = np.unique(part.codes * stride + units)
    counts.append(np.bincount(pairs // stride, minlength=len(part.groups)))
  return np.concatenate(counts)


def too_small(
  table: PredictionTable, parts: Sequence[Partition], units: np.ndarray, metric: str
) -> np.ndarray:
  """bool[groups of all partitions]: too few units, or of what the metric counts, to be ranked."""
  small = unit_counts(parts, units) < SMALL_UNITS
  needed = {"auroc": (0, 1), "true_positive_rate": (1,), "false_positive_rate": (0,)}
  for label in needed.get(metric, ()):
    kept = (table.label == label).reshape(len(table.label), -1).any(axis=1)
    of_label = [Partition(p.columns, p.groups, p.codes[kept]) for p in parts]
    small |= unit_counts(of_label, units[kept]) < SMALL_EVENTS
  return small


def incidence(parts: Sequence[Partition]) -> np.ndarray:
  """float[groups of all, groups of the last]: which of the last, finest ones each is made of."""
  finest = parts[-1]
  rows = [
    [group == tuple(cell[finest.columns.index(name)] for name in part.columns)
     for cell in finest.groups]
    for part in parts
    for group in part.groups
  ]  # fmt: skip
  return np.array(rows, float).reshape(len(rows), len(finest.groups))


def _class_values(table: PredictionTable, names: Sequence[str]) -> np.ndarray:
  if not names:
    return table.label.astype(str)
  return np.asarray(names, np.str_)[table.label]


def _partition(there: Mapping[str, np.ndarray], columns: tuple[str, ...], count: int) -> Partition:
  codes = np.zeros(count, np.int64)
  values: list[tuple[str, ...]] = [()] if count else []
  for name in columns:
    distinct, own = _distinct(there[name])
    used, codes = np.unique(codes * len(distinct) + own, return_inverse=True)
    values = [(*values[u // len(distinct)], str(distinct[u % len(distinct)])) for u in used]
  return Partition(columns, tuple(values), codes)


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The values that occur, bands and numbers in their order, and the place of each record's."""
  found, codes = np.unique(values, return_inverse=True)
  order = sorted(range(len(found)), key=lambda i: _natural(str(found[i])))
  return found[order], np.argsort(order)[codes]


def _natural(text: str) -> tuple[bool, float, str]:
  number = re.match(r"-?\d+(\.\d+)?", text)
  return not text.startswith("below "), float(number[0]) if number else float("inf"), text
