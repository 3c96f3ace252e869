"""The report's sections on accuracy and on what privacy cost of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.evaluation.intervals import Z
from dp_jax.evaluation.paired import accuracy_difference
from dp_jax.report import page, plots
from dp_jax.report.page import Section
from dp_jax.report.run_view import RunView, number
from dp_jax.statement import formatting

# Metrics of two classes or several labels, where a run has them.
_NOTE = page.paragraph(
  "Paired: both runs on the same held-out people. Where only the accuracies are known, the two "
  "runs count as independent samples, and the interval is wider. A single pair of runs says "
  "nothing about the spread over random seeds.",
  "note",
)
_RANKS = {"auroc": "AUROC", "average_precision": "average precision"}


def accuracy_section(runs: Sequence[RunView]) -> Section | None:
  """Accuracy of every run side by side, final and during training."""
  known = [(run, run.accuracy()) for run in runs]
  rows = [(run, accuracy) for run, accuracy in known if accuracy is not None]
  if not rows:
    if any(run.final.get("num_records") == 0 for run in runs):
      text = "No record of the held-out split could be used: nothing was measured."
      return Section("accuracy", "Accuracy", page.paragraph(text))
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
  """What privacy cost against runs without it."""
  lines = _lines(main, [run for run in others if run.record is None])
  if not lines:
    return None
  return Section("cost", "The cost of privacy", page.figures(lines) + _NOTE)


def beside_section(main: RunView, others: Sequence[RunView]) -> Section | None:
  """A private run beside others that are private too: each has a guarantee of its own."""
  lines = _lines(main, [run for run in others if run.record is not None])
  if not lines or main.record is None:
    return None
  own = formatting.round_up(main.record["epsilon"])
  intro = page.paragraph(
    f"Each of these runs has a guarantee of its own; that of this one is epsilon {own}. What they "
    "differ by is not the cost of privacy."
  )
  return Section("beside", "Beside other private runs", intro + page.figures(lines) + _NOTE)


def _lines(main: RunView, others: Sequence[RunView]) -> list[tuple[str, str]]:
  """The distance of a private run from each of the others."""
  own = main.accuracy()
  if own is None or main.record is None:
    return []
  known = [(other, other.accuracy()) for other in others]
  return [_difference(main, own, run, theirs) for run, theirs in known if theirs is not None]


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
  try:
    found = accuracy_difference(main.table, other.table)
    return found.low, found.high, "paired"
  except ValueError:
    pass  # no or other predictions: the accuracies are still known
  variance = sum(
    interval.value * (1 - interval.value) / run.num_records
    for run, interval in ((main, own), (other, theirs))
  )
  half = Z * math.sqrt(variance)
  return theirs.value - own.value - half, theirs.value - own.value + half, "unpaired"
