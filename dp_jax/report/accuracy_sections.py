"""The report's sections on accuracy; only for runs whose data were declared public."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dp_jax.evaluation.paired import accuracy_difference
from dp_jax.evaluation.predictions import load_predictions
from dp_jax.report import formatting, page, plots
from dp_jax.report.page import Markup, Section
from dp_jax.report.plots import Interval
from dp_jax.report.run_view import RunView, number, wilson

# Metrics of two classes or several labels, where a run has them.
_RANKS = {"auroc": "AUROC", "average_precision": "average precision"}
MAX_ROWS = 20  # more classes than this and only the hardest are drawn


def accuracy_section(runs: Sequence[RunView]) -> Section | None:
  """Accuracy of every run side by side, final and during training."""
  known = [(run, run.accuracy()) for run in runs]
  rows = [(run, accuracy) for run, accuracy in known if accuracy is not None]
  if not rows:
    return None
  ranks = {
    name: title
    for name, title in _RANKS.items()
    if any(number(run.final.get(name)) is not None for run, _ in rows)
  }
  numbers = page.table(
    f"Accuracy on the {runs[0].split or 'held-out'} split",
    ["run", "epsilon", "accuracy", "95% interval", *ranks.values(), "loss", "records"],
    [_accuracy_row(run, accuracy, list(ranks)) for run, accuracy in rows],
  )
  drawn = [(formatting.one_line(run.label, 24), accuracy) for run, accuracy in rows]
  caption = "Accuracy on held-out records. Intervals: 95%, for these records as a sample."
  figure = page.plot(plots.accuracy_plot(drawn), caption)
  return Section("accuracy", "Accuracy", figure + numbers + _progress(runs))


def cost_section(main: RunView, others: Sequence[RunView]) -> Section | None:
  """What privacy cost against runs without it, and what a public start gained."""
  own = main.accuracy()
  if own is None or main.record is None:
    return None
  lines = []
  for other in others:
    theirs = other.accuracy()
    if theirs is not None:
      lines.append(_difference(main, own, other, theirs))
  if not lines:
    return None
  note = (
    "Paired: both runs on the same held-out people. Where only the accuracies are known, the two "
    "runs count as independent samples, and the interval is wider. A single pair of runs says "
    "nothing about the spread over random seeds."
  )
  body = page.figures(lines) + page.paragraph(note, "note")
  return Section("cost", "The cost of privacy", body)


def class_section(runs: Sequence[RunView]) -> Section | None:
  """Accuracy of each class, every run."""
  with_classes = [run for run in runs if any(_class_intervals(run))]
  if not with_classes:
    return None
  intervals = {run.label: _class_intervals(run) for run in with_classes}
  size = min(len(values) for values in intervals.values())
  names = class_names(runs[0], size)
  first = intervals[with_classes[0].label]
  order = list(range(size))
  intro = ""
  if size > MAX_ROWS:
    order = sorted(order, key=lambda k: _value(first[k]))[:MAX_ROWS]
    intro = page.paragraph(f"The {MAX_ROWS} hardest of {size} classes.", "note")
  labels = {run.label: formatting.one_line(run.label, 24) for run in with_classes}
  svg = plots.class_plot(
    [names[k] for k in order],
    {labels[label]: [values[k] for k in order] for label, values in intervals.items()},
  )
  rows: list[list[page.Cell]] = [
    [names[k], *(_interval_text(values[k]) for values in intervals.values())] for k in range(size)
  ]
  numbers = page.table("Accuracy of each class", ["class", *intervals], rows)
  caption = "Accuracy on the held-out records of each class, with 95% intervals."
  gap = page.table(
    "Hardest and easiest class",
    ["run", "hardest class", "easiest class", "gap"],
    [_gap_row(run, intervals[run.label], names) for run in with_classes],
  )
  return Section(
    "classes", "Accuracy of each class", intro + gap + page.plot(svg, caption, numbers)
  )


def confusion_section(run: RunView) -> Section | None:
  """The confusion matrix as a shaded table; for many classes, the most frequent confusions."""
  matrix = _confusion(run)
  if matrix is None:
    return None
  names = class_names(run, len(matrix))
  body = page.paragraph(
    f"Rows are the true class, columns the predicted one, of the run “{run.label}”."
  )
  if len(matrix) <= MAX_ROWS:
    body += page.table(
      "Confusion matrix (records)",
      ["true \\ predicted", *names],
      [[names[i], *_shaded(row, i)] for i, row in enumerate(matrix)],
      "matrix",
    )
  pairs = sorted(
    ((n, i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j and n),
    key=lambda item: (-item[0], item[1], item[2]),
  )
  if len(matrix) > MAX_ROWS:
    top: list[list[page.Cell]] = [
      [names[i], names[j], formatting.count(n)] for n, i, j in pairs[:MAX_ROWS]
    ]
    body += page.table("Most frequent confusions", ["true", "predicted", "records"], top)
  elif pairs:
    n, i, j = pairs[0]
    body += page.paragraph(
      f"Most frequent confusion: {names[i]} taken for {names[j]}, {formatting.count(n)} times."
    )
  return Section("confusion", "Confusion matrix", body)


def accuracy_tiles(main: RunView, others: Sequence[RunView]) -> list[tuple[str, str, str]]:
  """The tiles on accuracy: the run's own, and its distance from a run without privacy."""
  own = main.accuracy()
  if own is None:
    return []
  records = formatting.count(main.num_records)
  found = [("Accuracy", formatting.percent(own.value), f"on {records} held-out records")]
  for other in others:
    theirs = other.accuracy()
    if main.record is not None and other.record is None and theirs is not None:
      points = 100 * (theirs.value - own.value)
      found.append(("Cost of privacy", f"{points:.1f} points", f"against “{other.label}”"))
      break
  return found


def class_names(run: RunView, size: int) -> list[str]:
  """The names of the classes, their numbers where the run declares none."""
  names: Any = None
  if run.record is not None:
    names = run.record.get("treated_as_public", {}).get("class_names")
  if isinstance(names, (list, tuple)) and len(names) >= size:
    return [formatting.one_line(name, 60) for name in names[:size]]
  return [str(k) for k in range(size)]


def _accuracy_row(run: RunView, accuracy: Interval, ranks: Sequence[str]) -> list[page.Cell]:
  ranked, loss = ([number(run.final.get(name)) for name in names] for names in (ranks, ["loss"]))
  return [
    run.label,
    formatting.round_up(run.record["epsilon"]) if run.record else "no privacy",
    formatting.percent(accuracy.value),
    f"{formatting.percent(accuracy.low)} to {formatting.percent(accuracy.high)}",
    *("" if value is None else f"{value:.3f}" for value in (*ranked, *loss)),
    formatting.count(run.num_records),
  ]


def _progress(runs: Sequence[RunView]) -> str:
  lines: dict[str, list[tuple[int, float]]] = {}
  for run in runs:
    points = [(step, number(metrics.get("accuracy"))) for step, metrics in run.history]
    known = [(step, value) for step, value in points if value is not None]
    if len(known) > 1:
      lines[formatting.one_line(run.label, 24)] = known
  if not lines:
    return ""
  rows: list[list[page.Cell]] = [
    [label, formatting.count(step), formatting.percent(value)]
    for label, points in lines.items()
    for step, value in points
  ]
  numbers = page.table("Accuracy during training", ["run", "step", "accuracy"], rows)
  caption = "Accuracy on held-out records during training."
  return "<h3>During training</h3>" + page.plot(plots.progress_plot(lines), caption, numbers)


def _difference(main: RunView, own: Interval, other: RunView, theirs: Interval) -> tuple[str, str]:
  """The distance in points, as a figure and a sentence."""
  points = 100 * (theirs.value - own.value)
  low, high, kind_of = _interval_of(main, own, other, theirs)
  between = f"{kind_of} 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
  figure = f"{abs(points):.1f} points"
  ours = f"“{main.label}” on {formatting.percent(own.value)}"
  rates = (
    f"“{other.label}” is right on {formatting.percent(theirs.value)} of the held-out "
    f"records, {ours} (difference in percentage points: {between})"
  )
  if other.record is None:
    kind = "lost to privacy" if points >= 0 else "gained despite privacy"
    return figure, f"{kind}, against a run without it. {rates}."
  epsilon = formatting.round_up(other.record["epsilon"])
  kind = "less" if points >= 0 else "more"
  return figure, f"{kind} than “{other.label}”, also private (epsilon {epsilon}). {rates}."


def _interval_of(
  main: RunView, own: Interval, other: RunView, theirs: Interval
) -> tuple[float, float, str]:
  """The interval of the other run's accuracy less the main one's, and whether it is paired."""
  if main.predictions is not None and other.predictions is not None:
    try:
      tables = [load_predictions(path) for path in (main.predictions, other.predictions)]
      found = accuracy_difference(tables[0], tables[1])
      return found.low, found.high, "paired"
    except ValueError:
      pass  # other records, or a file that says nothing: the accuracies are still known
  variance = sum(
    interval.value * (1 - interval.value) / run.num_records
    for run, interval in ((main, own), (other, theirs))
  )
  half = 1.96 * math.sqrt(variance)
  return theirs.value - own.value - half, theirs.value - own.value + half, "unpaired"


def _confusion(run: RunView) -> list[list[int]] | None:
  matrix = run.final.get("confusion")
  if not isinstance(matrix, list) or not matrix:
    return None
  if any(not isinstance(row, list) or len(row) != len(matrix) for row in matrix):
    return None
  return [[int(number(n) or 0) for n in row] for row in matrix]


def _class_intervals(run: RunView) -> list[Interval | None]:
  matrix = _confusion(run)
  if matrix is None:
    return []
  return [wilson(row[k] / sum(row), sum(row)) if sum(row) else None for k, row in enumerate(matrix)]


def _value(interval: Interval | None) -> float:
  return 2.0 if interval is None else interval.value


def _interval_text(interval: Interval | None) -> str:
  if interval is None:
    return "no records"
  low, high = formatting.percent(interval.low), formatting.percent(interval.high)
  return f"{formatting.percent(interval.value)} ({low} to {high})"


def _gap_row(
  run: RunView, intervals: Sequence[Interval | None], names: Sequence[str]
) -> list[page.Cell]:
  known = [(v.value, k) for k, v in enumerate(intervals) if v is not None]
  (low, worst), (high, best) = min(known), max(known)
  return [
    run.label,
    f"{names[worst]} ({formatting.percent(low)})",
    f"{names[best]} ({formatting.percent(high)})",
    f"{100 * (high - low):.1f} points",
  ]


def _shaded(row: Sequence[int], own: int) -> list[Markup]:
  total = sum(row) or 1
  kind = {True: "hit", False: "miss"}
  return [
    Markup(
      f'<span class="{kind[j == own]}" style="--share:{n / total:.3f}">'
      f"{formatting.count(n) if n else '·'}</span>"
    )
    for j, n in enumerate(row)
  ]
