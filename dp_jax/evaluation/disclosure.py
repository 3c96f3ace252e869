"""Which groups of private data may be shown: none under 11 units, nor any that gives one away.

The usual rule of disclosure control for tables: a cell under the threshold is suppressed, and with
it further cells of its line, since the total of the line less the cells that are shown would give
it away. It keeps a table from singling people out; it is no guarantee of differential privacy, and
what it lets through stays under `private/`.

Centers for Medicare & Medicaid Services, cell size suppression policy (threshold 11);
Hundepool et al. 2012, Statistical Disclosure Control, chapter 4 (secondary suppression).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.subgroups import CLASS, Partition, incidence, partitions, unit_counts

MIN_UNITS = 11


def suppressed(parts: Sequence[Partition], counts: np.ndarray) -> np.ndarray:
  """Which groups not to show.

  Args:
    parts: all records first, then every combination of the columns, as `partitions` gives them.
    counts: int[groups of all partitions], units of each.

  Returns:
    bool[groups of all partitions]. Beside the groups under MIN_UNITS, of each line (a group and
    the groups that one more column divides it into) so many, the smallest first, that what is left
    out is at least two groups and MIN_UNITS units; and so many that no group left out is a sum and
    difference of groups that are shown.
  """
  hidden = counts < MIN_UNITS
  lines = list(_lines(parts))
  tables = incidence(parts)
  while True:
    if not _complete_lines(lines, counts, hidden) and not _protect(lines, counts, hidden, tables):
      return hidden


def hidden_classes(
  table: PredictionTable, num_classes: int, groups: Sequence[str] = ()
) -> np.ndarray:
  """Which classes not to show, of data declared private.

  Args:
    table: the predictions, of one label a record.
    num_classes: how many classes there are.
    groups: columns whose groups, and those of their combinations, are shown beside the classes.
      Suppression is worked out on all of it as one table, since a column may say what the class
      says; whatever that hides among the classes is hidden.

  Returns:
    bool[num_classes]; True also for classes that nobody is of, and for all where that table can
    only be made safe by hiding what the groups on their own, or all records, show.

  Raises:
    ValueError: if a column is not there, or there are too many groups.
  """
  names = [str(name) for name in table.about.get("class_names", ())]
  if len(set(names)) < len(names):  # the table of the groups joins classes of one name
    if CLASS in groups:
      return np.ones(num_classes, bool)
    names = []
  hidden = _by_name(table, groups if CLASS in groups else (*groups, CLASS), names)
  alone = {**_by_name(table, groups, names), ((), ()): False}
  if any(hidden.get(group, True) and not out for group, out in alone.items()):
    return np.ones(num_classes, bool)
  names = names or [str(k) for k in range(num_classes)]
  found = [hidden.get(((CLASS,), (name,)), True) for name in names[:num_classes]]
  return np.array(found + [True] * (num_classes - len(found)), bool)


def _by_name(
  table: PredictionTable, columns: Sequence[str], class_names: Sequence[str]
) -> dict[tuple[tuple[str, ...], tuple[str, ...]], bool]:
  """Whether to hide each group, by the columns and values that define it."""
  parts = partitions(table, columns, class_names)
  out = suppressed(parts, unit_counts(parts, np.unique(table.unit, return_inverse=True)[1]))
  groups = [(part.columns, group) for part in parts for group in part.groups]
  return dict(zip(groups, out.tolist(), strict=True))


def _complete_lines(
  lines: Sequence[tuple[int, np.ndarray]], counts: np.ndarray, hidden: np.ndarray
) -> bool:
  """Hides more of a line whose total would give away what is hidden; whether any was."""
  changed = False
  for total, cells in lines:
    if hidden[total]:
      continue
    while hidden[cells].any() and not hidden[cells].all():
      out = cells[hidden[cells]]
      if len(out) > 1 and counts[out].sum() >= MIN_UNITS:
        break
      shown = cells[~hidden[cells]]
      hidden[shown[np.argmin(counts[shown])]] = True
      changed = True
    if len(cells) == 1 and hidden[cells[0]]:  # the same records
      hidden[total] = changed = True
  return changed


def _protect(
  lines: Sequence[tuple[int, np.ndarray]],
  counts: np.ndarray,
  hidden: np.ndarray,
  tables: np.ndarray,
) -> bool:
  """Hides one more group where several lines together give a hidden one away."""
  if not hidden.any() or hidden.all():
    return False
  # A hidden group is known exactly if it is a linear combination of those shown.
  basis = np.linalg.svd(tables[~hidden], full_matrices=False)
  span = basis.Vh[1e-9 * basis.S[0] < basis.S]
  rest = tables[hidden] - tables[hidden] @ span.T @ span
  known = np.flatnonzero(hidden)[np.abs(rest).max(axis=1) < 1e-6]
  if not len(known):
    return False
  # Of the lines that it stands in, as a part or as the total, the smallest group goes next.
  near = [
    place for total, cells in lines if known[0] in (total, *cells) for place in (total, *cells)
  ]
  candidates = [p for p in near if not hidden[p]] or np.flatnonzero(~hidden).tolist()
  hidden[min(candidates, key=lambda place: counts[place])] = True
  return True


def _lines(parts: Sequence[Partition]) -> Iterator[tuple[int, np.ndarray]]:
  """Each group, and the groups that one more column divides it into, by their places."""
  starts = np.cumsum([0, *(len(part.groups) for part in parts)])
  for coarse, start in zip(parts, starts[:-1], strict=True):
    for fine, first in zip(parts, starts[:-1], strict=True):
      if len(fine.columns) == len(coarse.columns) + 1 and set(coarse.columns) < set(fine.columns):
        keep = [fine.columns.index(name) for name in coarse.columns]
        own = [tuple(group[i] for i in keep) for group in fine.groups]
        for place, group in enumerate(coarse.groups):
          cells = np.array([i for i, values in enumerate(own) if values == group])
          yield int(start) + place, first + cells
