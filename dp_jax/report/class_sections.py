"""The report's sections on classes: accuracy of each, and which are taken for which.

On private data, classes of few people are suppressed by the rule that holds for groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.evaluation.disclosure import MIN_UNITS, hidden_classes
from dp_jax.evaluation.intervals import wilson
from dp_jax.evaluation.predictions import PredictionTable, check_same_records
from dp_jax.report import page, plots
from dp_jax.report.page import Markup, Section
from dp_jax.report.run_view import RunView, number
from dp_jax.statement import formatting

MAX_ROWS = 20  # more classes than this and only the hardest are drawn
SUPPRESSED = "suppressed"
_FEW = (
  f"Classes of fewer than {MIN_UNITS} people, or of which fewer than that were classified rightly, "
  "are suppressed, and with them as many others as it takes that none of them follows from a total "
  "or from the groups on this page."
)

_HIDDEN = "*"
_FEW_CONFUSED = (
  f"A * stands for fewer than {MIN_UNITS} people, or for more where a single * of a class would "
  "follow from the accuracy of the class. How many of a class were taken for others in all follows "
  "from that accuracy, and is not hidden."
)

Matrix = list[list[int] | None]


def hidden_on_page(runs: Sequence[RunView], groups: Sequence[str] = ()) -> list[np.ndarray]:
  """For each run of a page, the classes to suppress.

  What one run of private data hides, no other shows: all are taken for private if one is. A run
  whose people cannot be counted shows no class.

  Args:
    runs: of the page, the main one first.
    groups: the columns of the groups that stand on the same page, which may have "class" among
      them.

  Returns:
    bool[num_classes] for each run.
  """
  sizes = [len(_counts(run) or ()) for run in runs]
  size = max(sizes, default=0)
  if all(run.declared == "public" for run in runs):
    return [np.zeros(n, bool) for n in sizes]
  hidden, counted = np.zeros(size, bool), []
  main: PredictionTable | None = None
  for run in runs:
    try:
      table = run.table
      if main is None or not _same_records(main, table):
        hidden |= hidden_classes(table, size, groups)
      hidden |= _few_right(table, size)
      main = main or table
      counted.append(True)
    except ValueError:  # no predictions in the file, or the columns are not theirs
      counted.append(False)
  if main is not None and hidden.sum() == 1:  # what is right in all would give the one away
    people = np.bincount(_by_unit(main.label, main), minlength=size)[:size].astype(float)
    hidden[np.argmin(np.where(hidden, np.inf, people))] = True
  return [
    hidden[:n] if known else np.ones(n, bool) for n, known in zip(sizes, counted, strict=True)
  ]


def _few_right(table: PredictionTable, size: int) -> np.ndarray:
  """bool[size]: classes of which some people, but too few to show, were classified rightly."""
  right = table.label[table.predicted == table.label], table.unit[table.predicted == table.label]
  pairs = np.unique(np.stack(right), axis=1)[0]
  people = np.bincount(pairs[pairs >= 0], minlength=size)[:size]
  return np.asarray((people > 0) & (people < MIN_UNITS))


def _by_unit(labels: np.ndarray, table: PredictionTable) -> np.ndarray:
  """The class of each (class, person), once."""
  return np.unique(np.stack([labels, table.unit]), axis=1)[0]


def class_section(runs: Sequence[RunView], hidden: Sequence[np.ndarray]) -> Section | None:
  """Accuracy of each class, every run.

  Args:
    runs: the main one first.
    hidden: for each run the classes to suppress, from `hidden_on_page`.
  """
  found = {run.label: _confusion(run, own) for run, own in zip(runs, hidden, strict=True)}
  matrices = {label: matrix for label, matrix in found.items() if matrix is not None}
  if not any(_interval(matrix, k) for matrix in matrices.values() for k in range(len(matrix))):
    return None
  size = min(len(matrix) for matrix in matrices.values())
  names = class_names(runs[0], size)
  intervals = {
    label: [_interval(matrix, k) for k in range(size)] for label, matrix in matrices.items()
  }
  order = list(range(size))
  intro = ""
  if size > MAX_ROWS:
    first = next(iter(intervals.values()))
    order = sorted(order, key=lambda k: _value(first[k]))[:MAX_ROWS]
    intro = page.paragraph(f"The {MAX_ROWS} hardest of {size} classes.", "note")
  if any(row is None for matrix in matrices.values() for row in matrix):
    intro += page.paragraph(_FEW, "note")
  svg = plots.class_plot(
    [names[k] for k in order],
    {
      formatting.one_line(label, 24): [values[k] for k in order]
      for label, values in intervals.items()
    },
  )
  rows: list[list[page.Cell]] = [
    [names[k], *(_interval_text(matrix, k) for matrix in matrices.values())] for k in range(size)
  ]
  numbers = page.table("Accuracy of each class", ["class", *intervals], rows)
  caption = "Accuracy on the held-out records of each class, with 95% intervals."
  gap = page.table(
    "Hardest and easiest class",
    ["run", "hardest class", "easiest class", "gap"],
    [_gap_row(label, values, names) for label, values in intervals.items()],
  )
  return Section(
    "classes", "Accuracy of each class", intro + gap + page.plot(svg, caption, numbers)
  )


def confusion_section(run: RunView, hidden: np.ndarray, private: bool) -> Section | None:
  """The confusion matrix as a shaded table; for many classes, the most frequent confusions.

  Args:
    run: whose matrix.
    hidden: bool[num_classes], the classes to suppress.
    private: whether to suppress confusions of few people too.
  """
  matrix = _confusion(run, hidden)
  if matrix is None:
    return None
  few = _few_confused(run, len(matrix)) if private else np.zeros((len(matrix),) * 2, bool)
  names = class_names(run, len(matrix))
  body = page.paragraph(
    f"Rows are the true class, columns the predicted one, of the run “{run.label}”."
  )
  if hidden.any():
    body += page.paragraph(_FEW, "note")
  if few.any():
    body += page.paragraph(_FEW_CONFUSED, "note")
  if len(matrix) <= MAX_ROWS:
    body += page.table(
      "Confusion matrix (records)",
      ["true \\ predicted", *names],
      [_row(names[i], row, i, few[i]) for i, row in enumerate(matrix)],
      "matrix",
    )
  pairs = sorted(
    (
      (n, i, j)
      for i, row in enumerate(matrix)
      for j, n in enumerate(row or ())
      if i != j and n and not few[i, j]
    ),
    key=lambda item: (-item[0], item[1], item[2]),
  )
  if len(matrix) > MAX_ROWS:
    top: list[list[page.Cell]] = [
      [names[i], names[j], formatting.count(n)] for n, i, j in pairs[:MAX_ROWS]
    ]
    body += page.table("Most frequent confusions", ["true", "predicted", "records"], top)
  elif pairs:
    n, i, j = pairs[0]
    times = "once" if n == 1 else f"{formatting.count(n)} times"
    body += page.paragraph(f"Most frequent confusion: {names[i]} taken for {names[j]}, {times}.")
  return Section("confusion", "Confusion matrix", body)


def _few_confused(run: RunView, size: int) -> np.ndarray:
  """Which confusions are of few people: bool[size, size].

  With one alone of a class another goes, since the accuracy of the class gives their sum. Of two
  classes that accuracy is the confusion, and nothing is gained by hiding it.
  """
  few = np.zeros((size, size), bool)
  if size < 3:  # what the note says of all others of a class
    return few
  try:
    table = run.table
  except ValueError:  # then all classes are suppressed
    return few
  cells = np.unique(np.stack([table.label * size + table.predicted, table.unit]), axis=1)[0]
  people = np.bincount(cells, minlength=size * size).reshape(size, size).astype(float)
  np.fill_diagonal(people, np.inf)
  few = (people > 0) & (people < MIN_UNITS)
  for row in np.flatnonzero(few.sum(axis=1) == 1):
    others = np.flatnonzero((people[row] >= MIN_UNITS) & np.isfinite(people[row]))
    if len(others):
      few[row, others[np.argmin(people[row, others])]] = True
    else:  # with what nobody is taken for
      few[row] = np.arange(size) != row
  return few


def class_names(run: RunView, size: int) -> list[str]:
  """The names of the classes, their numbers where the run declares none."""
  names: Any = None
  if run.record is not None:
    names = run.record.get("treated_as_public", {}).get("class_names")
  if isinstance(names, (list, tuple)) and len(names) >= size:
    return [formatting.one_line(name, 60) for name in names[:size]]
  return [str(k) for k in range(size)]


def _confusion(run: RunView, hidden: np.ndarray) -> Matrix | None:
  """The rows of the true classes; None for a row that is suppressed."""
  matrix = _counts(run)
  if matrix is None:
    return None
  return [
    None if h else [int(number(n) or 0) for n in row] for h, row in zip(hidden, matrix, strict=True)
  ]


def _counts(run: RunView) -> list[list[Any]] | None:
  matrix = run.final.get("confusion")
  if not isinstance(matrix, list) or not matrix:
    return None
  if any(not isinstance(row, list) or len(row) != len(matrix) for row in matrix):
    return None
  return matrix


def _same_records(first: PredictionTable, second: PredictionTable) -> bool:
  try:
    check_same_records([first, second])
  except ValueError:
    return False
  return True


def _interval(matrix: Matrix, k: int) -> Interval | None:
  row = matrix[k] or []
  total = sum(row)
  return wilson(row[k] / total, total) if total else None


def _interval_text(matrix: Matrix, k: int) -> str:
  interval = _interval(matrix, k)
  if interval is None:
    return SUPPRESSED if matrix[k] is None else "no records"
  low, high = formatting.percent(interval.low), formatting.percent(interval.high)
  return f"{formatting.percent(interval.value)} ({low} to {high})"


def _value(interval: Interval | None) -> float:
  return 2.0 if interval is None else interval.value


def _gap_row(
  label: str, intervals: Sequence[Interval | None], names: Sequence[str]
) -> list[page.Cell]:
  known = [(v.value, k) for k, v in enumerate(intervals) if v is not None]
  if not known:
    return [label, "", "", ""]
  (low, worst), (high, best) = min(known), max(known)
  return [
    label,
    f"{names[worst]} ({formatting.percent(low)})",
    f"{names[best]} ({formatting.percent(high)})",
    f"{100 * (high - low):.1f} points",
  ]


def _row(name: str, row: Sequence[int] | None, own: int, few: np.ndarray) -> list[page.Cell]:
  if row is None:
    return [f"{name} ({SUPPRESSED})", *[""] * len(few)]
  total = sum(row) or 1
  kind = {True: "hit", False: "miss"}
  cells = [
    Markup(
      f'<span class="{kind[j == own]}" style="--share:{n / total:.3f}">'
      f"{formatting.count(n) if n else '·'}</span>"
    )
    if not few[j] else _HIDDEN
    for j, n in enumerate(row)
  ]  # fmt: skip
  return [name, *cells]
