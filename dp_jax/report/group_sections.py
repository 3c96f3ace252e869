"""The report's sections on groups of people: what the model does to each, beside a plain run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dp_jax.evaluation.fairness import Fairness, GroupFigure, fairness, measure
from dp_jax.evaluation.gaps import compare_tables
from dp_jax.evaluation.predictions import (
  PredictionTable,
  check_same_records,
)
from dp_jax.evaluation.record_metrics import METRICS, default_metrics
from dp_jax.report import page, plots
from dp_jax.report.comparison_page import (
  MAX_DRAWN,
  change_text,
  metric_section,
  value_text,
)
from dp_jax.report.page import Section
from dp_jax.report.run_view import RunView
from dp_jax.statement import formatting

NOT_SHOWN = "groups"  # the anchor of the section that says why there are none


def group_sections(main: RunView, others: Sequence[RunView]) -> list[Section]:
  """A section for each metric: groups of data.groups, and their combinations.

  Beside the run stands the first other one, one without privacy if there is any, that was evaluated
  on the same records. If the data of any run are private, small groups are suppressed.

  Args:
    main: the run.
    others: further runs.

  Returns:
    Empty if no groups are configured or the run has no predictions.
  """
  columns = list(main.config.get("data", {}).get("groups") or ())
  if not columns or main.predictions is None:
    return []
  private = any(run.declared != "public" for run in (main, *others))
  try:
    table = main.table
    partner = _partner(table, others)
    if partner is None:
      return _alone(main, table, columns, private)
    other, theirs = partner
    names = table.about.get("class_names", ())
    labels = (formatting.one_line(main.label, 60), formatting.one_line(other.label, 60))
    return [
      metric_section(
        compare_tables((table, theirs), labels, columns, name, private=private, class_names=names),
        f"groups-{name.replace('_', '-')}", "",
      )
      for name in default_metrics(table)
    ]  # fmt: skip
  except ValueError as error:  # a column of names makes no groups: that is no reason to lose a run
    return [Section(NOT_SHOWN, "Groups", page.paragraph(f"Not shown: {error}"))]


def _partner(
  table: PredictionTable, others: Sequence[RunView]
) -> tuple[RunView, PredictionTable] | None:
  for other in sorted(others, key=lambda run: run.record is not None):
    if other.predictions is not None:
      theirs = other.table
      try:
        check_same_records([table, theirs])
      except ValueError:
        continue
      return other, theirs
  return None


def _alone(
  main: RunView, table: PredictionTable, columns: Sequence[str], private: bool
) -> list[Section]:
  """The figures of one run."""
  names = table.about.get("class_names", ())
  found = []
  for metric in default_metrics(table):
    (measured,) = measure([table], columns, metric, private=private, class_names=names)
    found.append(_section(main, fairness(measured)))
  return found


def _section(main: RunView, found: Fairness) -> Section:
  anchor = f"groups-{found.metric.replace('_', '-')}"
  title = METRICS[found.metric].title
  heading = f"{title[0].upper()}{title[1:]} of each group"
  numbers = page.table(
    heading,
    ["group", "units", title, "gap to all", ""],
    [_row(g, found.metric) for g in found.groups],
  )
  drawn = [g for g in found.groups if g.status != "suppressed" and np.isfinite(g.value.low)]
  drawn, body = drawn[:MAX_DRAWN], numbers
  if drawn:
    svg = plots.class_plot(
      [g.name + (" *" if g.status == "small" else "") for g in drawn],
      {formatting.one_line(main.label, 24): [g.value for g in drawn]},
      name=f"plot-{anchor}", title=heading, kind="groups", percent=METRICS[found.metric].percent,
    )  # fmt: skip
    caption = f"{heading}, with 95% intervals. A star marks a group that is too small to be ranked."
    body = page.plot(svg, caption, numbers)
  spreads: list[list[page.Cell]] = [
    [" and ".join(c.columns), c.worst, c.best, change_text(c.largest_gap, found.metric, False)]
    for c in found.columns
  ]
  if spreads:
    caption = f"Largest gap in {title} between two groups"
    body += page.table(caption, ["by", "worst group", "best group", "gap"], spreads)
  return Section(anchor, heading, body)


def _row(group: GroupFigure, metric: str) -> list[page.Cell]:
  if group.status == "suppressed":
    return [group.name, "", "", "", "suppressed"]
  note = "too small to be ranked" if group.status == "small" else ""
  count = formatting.count(group.units)
  return [group.name, count, value_text(group.value, metric), change_text(group.gap, metric), note]
