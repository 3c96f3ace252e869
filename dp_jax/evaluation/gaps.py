"""Two models on the same people: did the gaps between groups widen?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dp_jax.evaluation import bootstrap
from dp_jax.evaluation.bootstrap import LEVEL, Interval
from dp_jax.evaluation.fairness import (
  Fairness,
  Measured,
  fairness,
  largest_gap,
  measure,
  spread_of,
)
from dp_jax.evaluation.intervals import difference, wider
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.record_metrics import METRICS

Verdict = Literal["widened", "narrowed", "no evidence either way"]


@dataclass(frozen=True)
class Change:
  """One gap in both models.

  Attributes:
    name: of the group, or of the columns whose largest gap it is.
    columns, values: what defines the group; no values for a largest gap.
    first, second: the gap in each model.
    difference: first less second, on paired resamples.
    verdict: what the interval of the difference allows to say.
    sentence: the same for people.
  """

  name: str
  columns: tuple[str, ...]
  values: tuple[str, ...]
  first: Interval
  second: Interval
  difference: Interval
  verdict: Verdict
  sentence: str

  def to_dict(self) -> dict[str, Any]:
    """JSON values; intervals are [value, low, high]."""
    return {
      "name": self.name,
      "group": dict(zip(self.columns, self.values, strict=True)) if self.values else None,
      "columns": list(self.columns),
      "first": self.first.to_list(),
      "second": self.second.to_list(),
      "difference": self.difference.to_list(),
      "verdict": self.verdict,
      "sentence": self.sentence,
    }


@dataclass(frozen=True)
class Comparison:
  """One metric of two models on the same units.

  Attributes:
    metric: its name.
    labels: what the models are called.
    first, second: the figures of each.
    overall: first less second on all records, paired.
    changes: of the gap of each group to the overall, then of the largest gap of each column.
  """

  metric: str
  labels: tuple[str, str]
  first: Fairness
  second: Fairness
  overall: Interval
  changes: tuple[Change, ...]

  def summary(self) -> str:
    """What to make of all changes together."""
    told = [
      sum(c.verdict == verdict for c in self.changes) or "none"
      for verdict in ("widened", "narrowed")
    ]
    count = len(self.changes)
    return (
      f"Of {count} gaps in {METRICS[self.metric].title}, {told[0]} widened and {told[1]} narrowed;"
      f" for the others there is no evidence either way. With equal models about"
      f" {(1 - LEVEL) * count:.1f} of them would seem to have changed."
    )

  def to_dict(self) -> dict[str, Any]:
    """JSON values; intervals are [value, low, high]."""
    return {
      "metric": self.metric,
      "labels": list(self.labels),
      "overall_difference": self.overall.to_list(),
      "first": self.first.to_dict(),
      "second": self.second.to_dict(),
      "changes": [change.to_dict() for change in self.changes],
      "summary": self.summary(),
    }


def compare_tables(
  tables: tuple[PredictionTable, PredictionTable],
  labels: tuple[str, str],
  columns: Sequence[str],
  metric: str,
  *,
  private: bool,
  class_names: Sequence[str] = (),
  resamples: int = bootstrap.RESAMPLES,
  seed: int = 0,
) -> Comparison:
  """Compares the gaps of two models.

  Args:
    tables: predictions of both, record by record on the same records.
    labels: what to call the models.
    columns: the columns that make up groups, each and in combination.
    metric: of METRICS.
    private: whether small groups have to be suppressed.
    class_names: of the classes.
    resamples: of the bootstrap.
    seed: of the bootstrap.

  Raises:
    ValueError: for an unknown column or metric, or tables that cannot be paired.
  """
  first, second = measure(
    tables, columns, metric, private=private, class_names=class_names, resamples=resamples,
    seed=seed,
  )  # fmt: skip
  figures = fairness(first), fairness(second)
  (overall,) = bootstrap.interval(
    (first.values - second.values)[:1], (first.samples - second.samples)[:, :1]
  )
  if overall.low == overall.high:  # the same predictions in both
    overall = wider(overall, difference(figures[0].overall, figures[1].overall))
  if first.status[0] == "suppressed":
    overall = Interval(*[float("nan")] * 3)
  changes = [
    *_group_changes(first, second, figures, labels),
    *_column_changes(first, second, labels),
  ]
  return Comparison(metric, labels, *figures, overall, tuple(changes))


def _group_changes(
  first: Measured, second: Measured, figures: tuple[Fairness, Fairness], labels: tuple[str, str]
) -> list[Change]:
  """Of the groups that can be ranked in both models."""
  (values, samples), (others, other_samples) = first.gaps(), second.gaps()
  signed = list(bootstrap.interval(values - others, samples - other_samples))
  sizes = list(
    bootstrap.interval(np.abs(values) - np.abs(others), np.abs(samples) - np.abs(other_samples))
  )
  changes = []
  for place, (a, b) in enumerate(zip(figures[0].groups, figures[1].groups, strict=True), start=1):
    if signed[place].low == signed[place].high:
      signed[place] = wider(signed[place], difference(a.gap, b.gap))
    if a.status != "shown" or not np.isfinite(signed[place].low):
      continue
    verdict = _verdict(a.gap, b.gap, signed[place], sizes[place])
    sentence = _group_sentence(a.name, (a.gap, b.gap), signed[place], verdict, labels, first.metric)
    changes.append(
      Change(a.name, a.columns, a.values, a.gap, b.gap, signed[place], verdict, sentence)
    )
  return changes


def _column_changes(first: Measured, second: Measured, labels: tuple[str, str]) -> list[Change]:
  changes = []
  for i, part in enumerate(first.parts):
    places = np.intersect1d(first.ranked(i), second.ranked(i))
    if len(places) < 2:
      continue
    (values, samples), (others, other_samples) = (largest_gap(m, places) for m in (first, second))
    own, other = spread_of(first, places), spread_of(second, places)
    (moved,) = bootstrap.interval(values - others, samples - other_samples)
    if moved.low == moved.high:
      moved = wider(moved, difference(own, other))
    verdict = _verdict(own, other, moved, moved)
    name = f"largest gap by {' and '.join(part.columns)}"
    sentence = _column_sentence(name, (own, other), moved, verdict, labels, first.metric)
    changes.append(Change(name, part.columns, (), own, other, moved, verdict, sentence))
  return changes


def _verdict(first: Interval, second: Interval, signed: Interval, size: Interval) -> Verdict:
  """What may be said of a gap.

  Evidence is an interval of the signed difference without zero. A group that lies, beyond chance,
  on one side of the overall in one model and on the other side in the other has moved; its gap has
  changed only if there is evidence that its size has.
  """
  crossed = first.excludes_zero and second.excludes_zero and first.value * second.value < 0
  if not signed.excludes_zero or (crossed and not size.excludes_zero):
    return "no evidence either way"
  return "widened" if abs(first.value) > abs(second.value) else "narrowed"


def _group_sentence(
  name: str, gaps: tuple[Interval, Interval], difference: Interval, verdict: Verdict,
  labels: tuple[str, str], metric: str,
) -> str:  # fmt: skip
  title = METRICS[metric].title
  places = [
    f"{amount(abs(gap.value), metric)} {'below' if gap.value < 0 else 'above'} the overall"
    f" with {label}"
    for gap, label in zip(gaps, labels, strict=True)
  ]
  return (
    f"{name}: {title} lies {places[0]} and {places[1]}: {_told(verdict, difference)}"
    f" ({_difference_text(difference, metric)})."
  )


def _column_sentence(
  name: str, gaps: tuple[Interval, Interval], difference: Interval, verdict: Verdict,
  labels: tuple[str, str], metric: str,
) -> str:  # fmt: skip
  return (
    f"{name}: {amount(gaps[0].value, metric)} in {METRICS[metric].title} with {labels[0]} and"
    f" {amount(gaps[1].value, metric)} with {labels[1]}: {_told(verdict, difference)}"
    f" ({_difference_text(difference, metric)})."
  )


def _told(verdict: Verdict, difference: Interval) -> str:
  if verdict != "no evidence either way":
    return f"the gap {verdict}"
  if difference.excludes_zero:
    return "the group changed sides, no evidence either way that the gap has another size"
  return verdict


def _difference_text(difference: Interval, metric: str) -> str:
  value, low = (
    amount(x, metric, signed=True, bare=True) for x in (difference.value, difference.low)
  )
  return f"difference {value}, 95% interval {low} to {amount(difference.high, metric, signed=True)}"


def amount(value: float, metric: str, *, signed: bool = False, bare: bool = False) -> str:
  """A difference of a metric as text: percentage points, else a number.

  Args:
    value: the difference.
    metric: of METRICS.
    signed: whether to write a plus.
    bare: whether to leave out the word "points".
  """
  percent = METRICS[metric].percent
  shown, decimals = (100 * value, 1) if percent else (value, 3)
  number = f"{shown:.{decimals}f}"
  if float(number) == 0:  # the bound of an interval that excludes zero must not read as zero
    number = f"{shown:.{decimals + 2}f}"
  if float(number) == 0:
    number = f"{0:.{decimals}f}"
  elif signed and value > 0:
    number = f"+{number}"
  return f"{number} points" if percent and not bare else number
