"""comparison.html: two runs on the same people, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.evaluation.disclosure import MIN_UNITS
from dp_jax.evaluation.fairness import GroupFigure
from dp_jax.evaluation.gaps import Change, Comparison, amount
from dp_jax.evaluation.record_metrics import METRICS
from dp_jax.evaluation.subgroups import SMALL_EVENTS, SMALL_UNITS
from dp_jax.report import page, plots
from dp_jax.statement import formatting

PRIVATE = (
  "The data were declared private. What stands here was measured on them without noise, and partly "
  "on a model without any guarantee: it is not covered by the guarantee of the release. Keep it "
  "with those who may see the data."
)
MAX_DRAWN = 24  # groups; more stand in the table alone
MAX_OPEN = 12  # sentences; more are folded


@dataclass(frozen=True)
class Compared:
  """What the page shows.

  Attributes:
    data: the name of the data.
    split: that the runs were evaluated on.
    unit: what was resampled, such as "patient_id".
    units: how many; 0 where that is not to be shown.
    resamples: how many resamples.
    groups: the columns that make up groups.
    private: whether the data were declared private.
    final: of the final models, one for each metric.
    matched: the same at equal overall accuracy; empty where no steps of the plain run were kept.
    matched_note: which step that was, or why there is none.
  """

  data: str
  split: str
  unit: str
  units: int
  resamples: int
  groups: tuple[str, ...]
  private: bool
  final: Sequence[Comparison]
  matched: Sequence[Comparison]
  matched_note: str


def comparison_page(compared: Compared, further: Sequence[page.Section] = ()) -> str:
  """The page: it stands alone, without network or script.

  Args:
    compared: what it shows.
    further: sections on the two runs that go with it.
  """
  labels = compared.final[0].labels
  found = [_summary(compared)]
  found += [metric_section(c, f"final-{c.metric}", "") for c in compared.final]
  found += [
    metric_section(c, f"matched-{c.metric}", " at equal overall accuracy") for c in compared.matched
  ]
  if not compared.matched:
    note = page.paragraph(compared.matched_note)
    found.append(page.Section("matched", "At equal overall accuracy", note))
  found += [*further, _method(compared)]
  title = f"{compared.data}: {labels[0]} and {labels[1]}, group by group"
  header = f'<p class="kind">Comparison of two runs</p><h1>{page.escape(title, 160)}</h1>'
  if compared.private:
    header += page.callout("Not covered by the guarantee.", PRIVATE)
  footer = page.paragraph("Written by dp_jax.")
  return page.document(f"Comparison: {compared.data}", header, found, footer)


def _summary(compared: Compared) -> page.Section:
  lines = []
  for comparison in compared.final:
    title, difference = METRICS[comparison.metric].title, comparison.overall
    shown = change_text(difference, comparison.metric)
    text = (
      f"{title[0].upper()}{title[1:]} with {comparison.labels[0]} less that with "
      f"{comparison.labels[1]}, on all records: {shown}, 95% interval. {comparison.summary()}"
    )
    lines.append((_amount(difference.value, comparison), text))
  return page.Section("summary", "Overall", page.figures(lines))


def metric_section(comparison: Comparison, anchor: str, suffix: str) -> page.Section:
  """One metric of both runs in each group: plot, table, and a sentence for each gap."""
  title = METRICS[comparison.metric].title
  heading = f"{title[0].upper()}{title[1:]} of each group{suffix}"
  told = [change for change in comparison.changes if change.verdict != "no evidence either way"]
  rest = [change for change in comparison.changes if change.verdict == "no evidence either way"]
  body = page.paragraph(f"Against {comparison.labels[1]}.") if suffix else ""
  body += _plot(comparison, anchor, heading) + _sentences("Gaps that changed", told)
  body += _sentences("No evidence either way", rest) + _spreads(comparison, suffix)
  return page.Section(anchor, heading, body)


def _plot(comparison: Comparison, anchor: str, heading: str) -> str:
  numbers = page.table(
    heading,
    ["group", "units", *comparison.labels, f"gap, {comparison.labels[0]}",
     f"gap, {comparison.labels[1]}", ""],
    [
      _row(comparison, a, b)
      for a, b in zip(comparison.first.groups, comparison.second.groups, strict=True)
    ],
  )  # fmt: skip
  drawn = [
    (a, b)
    for a, b in zip(comparison.first.groups, comparison.second.groups, strict=True)
    if a.status != "suppressed" and np.isfinite(a.value.low) and np.isfinite(b.value.low)
  ][:MAX_DRAWN]
  if not drawn:
    return numbers
  names = [formatting.one_line(label, 24) for label in comparison.labels]
  svg = plots.class_plot(
    [_short(a) + (" *" if a.status == "small" else "") for a, _ in drawn],
    {
      names[0]: [a.value for a, _ in drawn],
      names[1]: [b.value for _, b in drawn],
    },
    name=f"plot-{anchor}",
    title=heading,
    kind="groups",
    percent=METRICS[comparison.metric].percent,
  )
  caption = f"{heading}, with 95% intervals. A star marks a group that is too small to be ranked."
  return page.plot(svg, caption, numbers)


def _short(group: GroupFigure) -> str:
  """A group in a plot: of a combination the values alone, as its columns stand above it."""
  return group.name if len(group.columns) == 1 else ", ".join(group.values)


def _row(comparison: Comparison, a: GroupFigure, b: GroupFigure) -> list[page.Cell]:
  if a.status == "suppressed":
    return [a.name, "", "", "", "", "", "suppressed"]
  note = "too small to be ranked" if a.status == "small" else ""
  values = [value_text(interval, comparison.metric) for interval in (a.value, b.value)]
  gaps = [change_text(interval, comparison.metric) for interval in (a.gap, b.gap)]
  return [a.name, formatting.count(a.units), *values, *gaps, note]


def _spreads(comparison: Comparison, suffix: str) -> str:
  rows: list[list[page.Cell]] = [
    [" and ".join(c.columns), label, c.worst, c.best,
     change_text(c.largest_gap, comparison.metric, False)]
    for label, figures in zip(comparison.labels, (comparison.first, comparison.second), strict=True)
    for c in figures.columns
  ]  # fmt: skip
  if not rows:
    return ""
  caption = f"Largest gap in {METRICS[comparison.metric].title} between two groups{suffix}"
  return page.table(caption, ["by", "run", "worst group", "best group", "gap"], rows)


def _sentences(title: str, changes: Sequence[Change]) -> str:
  if not changes:
    return ""
  items = "".join(f"<li>{page.escape(change.sentence)}</li>" for change in changes)
  told, heading = f"<ul>{items}</ul>", f"<h3>{page.escape(title)}</h3>"
  if len(changes) <= MAX_OPEN:
    return heading + told
  return f"{heading}<details><summary>{len(changes)} gaps</summary>{told}</details>"


def _method(compared: Compared) -> page.Section:
  unit = "record" if compared.unit == "record" else f"{compared.unit} with all its records"
  small = (
    f"Groups under {MIN_UNITS} units are suppressed, and with them as many others as it takes that "
    "none of them follows from a total."
    if compared.private
    else "No group is left out."
  )
  units = f"{formatting.count(compared.units)} units of " if compared.units else ""
  body = page.paragraph(
    f"Both runs were evaluated on the same {units}{compared.split}. Intervals are percentiles of "
    f"{formatting.count(compared.resamples)} resamples, in which each {unit} is drawn with "
    "replacement; both runs are measured on the same resamples, so that what is hard for both "
    "cancels in a difference. They hold for these two models: they say nothing of other seeds."
  ) + page.paragraph(
    f"A gap is the metric of a group less that of all records. {small} A group with under "
    f"{SMALL_UNITS} units, or under {SMALL_EVENTS} of what a metric counts, is marked and takes "
    "no part in worst groups and largest gaps. A largest gap is never negative, and chance alone "
    "makes it positive."
  )
  return page.Section("method", "How this was measured", body)


def value_text(interval: Interval, metric: str) -> str:
  """A metric with its interval."""
  if not np.isfinite(interval.value):
    return "not defined"
  show = formatting.percent if METRICS[metric].percent else "{:.3f}".format
  if not np.isfinite(interval.low):
    return show(interval.value)
  return f"{show(interval.value)} ({show(interval.low)} to {show(interval.high)})"


def change_text(interval: Interval, metric: str, signed: bool = True) -> str:
  """A difference of a metric with its interval."""
  if not np.isfinite(interval.low):
    return "not defined"
  low = amount(interval.low, metric, signed=signed, bare=True)
  value, high = (amount(x, metric, signed=signed) for x in (interval.value, interval.high))
  return f"{value} ({low} to {high})"


def _amount(value: float, comparison: Comparison) -> str:
  return "not shown" if np.isnan(value) else amount(value, comparison.metric, signed=True)
