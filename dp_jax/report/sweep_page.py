"""sweep.html and sweep.md: accuracy and gaps against epsilon, and what such a search costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.report import page, sweep_plot
from dp_jax.statement import formatting
from dp_jax.statement.sentences import ACCOUNTANTS

PRIVATE = (
  "The data were declared private. These figures were measured on them without noise, many on "
  "models without any guarantee: no epsilon covers this page. Keep it with those who may see the "
  "data."
)


@dataclass(frozen=True)
class Row:
  """All runs of one target.

  Attributes:
    epsilon: the target; None without privacy.
    accuracies: held-out accuracy, one a seed.
    accuracy: their mean, with its interval over seeds.
    gaps: column to the largest gap in accuracy between two of its groups, over seeds.
    selection: epsilon of releasing the best of as many runs as the sweep has private ones; None
      without privacy or where that cannot be accounted.
  """

  epsilon: float | None
  accuracies: tuple[float, ...]
  accuracy: Interval
  gaps: Mapping[str, Interval]
  selection: float | None

  @property
  def name(self) -> str:
    """For people."""
    return "no privacy" if self.epsilon is None else formatting.short(self.epsilon)


@dataclass(frozen=True)
class SweepTable:
  """What a sweep found.

  Attributes:
    data: the name of the data.
    split: that the accuracy is on.
    private: whether the data were declared private.
    unit: what one guarantee protects.
    delta: of every run, and of the total.
    seeds: how many of each target.
    rows: by increasing epsilon, the runs without privacy last.
    columns: the columns of the gaps.
    private_runs: how many private runs the folder holds, those of earlier sweeps included.
    total: epsilon of all of them together; None where they have no common guarantee.
    accountant: of the total, or why there is none.
  """

  data: str
  split: str
  private: bool
  unit: str
  delta: float
  seeds: int
  rows: Sequence[Row]
  columns: Sequence[str]
  private_runs: int
  total: float | None
  accountant: str

  def to_dict(self) -> dict[str, Any]:
    """JSON values; intervals are [mean, low, high], None where there is none."""
    return {
      "data": self.data, "split": self.split, "unit": self.unit, "delta": self.delta,
      "seeds": self.seeds,
      "rows": [
        {
          "epsilon": row.epsilon, "accuracies": list(row.accuracies),
          "accuracy": row.accuracy.to_list(),
          "largest_gap": {name: gap.to_list() for name, gap in row.gaps.items()},
          "private_selection_epsilon": row.selection,
        }
        for row in self.rows
      ],
      "private_runs": self.private_runs, "total_epsilon": self.total,
      "total_accountant": self.accountant, "statement": self.statement(),
    }  # fmt: skip

  def statement(self) -> str:
    """What the sweep as a whole guarantees: a function of the mechanisms alone."""
    unit = formatting.one_line(self.unit, 60)
    accountant = ACCOUNTANTS.get(self.accountant, self.accountant)
    together = (
      f"no epsilon that could be stated ({formatting.one_line(self.accountant, 300)})"
      if self.total is None
      else f"({formatting.round_up(self.total)}, {formatting.plain(self.delta)})-differential "
      f"privacy for each {unit} by composition ({accountant})"
    )
    return (
      f"No run's epsilon covers a sweep on private data. The {self.private_runs} private runs in "
      "this folder used the same data: whoever sees several of them, or one that was chosen among "
      f"them, sees what they release together, {together}. Runs without privacy have no guarantee, "
      "and the figures here are measured without noise: no epsilon covers them, nor settings that "
      "were chosen by them."
    )


def sweep_page(table: SweepTable) -> str:
  """The page: it stands alone, without network or script."""
  title = f"{table.data}: accuracy and gaps against epsilon"
  header = f'<p class="kind">Sweep</p><h1>{page.escape(title, 160)}</h1>'
  if table.private:
    header += page.callout("Not covered by any guarantee.", PRIVATE)
  found = [_accuracy_section(table)]
  if table.columns:
    found.append(_gap_section(table))
  found.append(_cost_section(table))
  return page.document(f"Sweep: {table.data}", header, found, page.paragraph("Written by dp_jax."))


def sweep_markdown(table: SweepTable) -> str:
  """The same as Markdown."""
  header, rows = _header(table), [_cells(table, row) for row in table.rows]
  lines = [" | ".join(["", *map(formatting.markdown, cells), ""]).strip() for cells in rows]
  head = " | ".join(["", *map(formatting.markdown, header), ""]).strip()
  rule = "|" + " --- |" * len(header)
  return (
    f"# Sweep: {formatting.markdown(table.data)}\n\n{_note(table)}\n\n"
    + "\n".join([head, rule, *lines])
    + f"\n\n{formatting.markdown(table.statement(), 2000)}\n\n{_selection_note(table)}\n"
  )


def panels(table: SweepTable) -> dict[str, sweep_plot.Lines]:
  """What the plots show."""
  found: dict[str, sweep_plot.Lines] = {
    "accuracy": {"accuracy": [(row.epsilon, row.accuracy) for row in table.rows]}
  }
  gaps = {
    f"by {formatting.one_line(name, 24)}": [
      (row.epsilon, row.gaps[name]) for row in table.rows if np.isfinite(row.gaps[name].value)
    ]
    for name in table.columns
  }
  gaps = {name: points for name, points in gaps.items() if points}
  return found | ({"largest gap in accuracy": gaps} if gaps else {})


def _accuracy_section(table: SweepTable) -> page.Section:
  svg = sweep_plot.inline_plot(
    panels(table)["accuracy"], "plot-sweep-accuracy", "Accuracy against epsilon", "accuracy"
  )
  rows: list[list[page.Cell]] = [
    [row.name, _interval(row.accuracy), ", ".join(map(formatting.percent, row.accuracies))]
    for row in table.rows
  ]
  numbers = page.table(
    f"Accuracy on the {table.split} split", ["epsilon", "mean (95% interval)", "each seed"], rows
  )
  caption = "Mean held-out accuracy against epsilon, with 95% intervals over seeds."
  body = page.paragraph(_note(table)) + page.plot(svg, caption) + numbers
  return page.Section("accuracy", "Accuracy against epsilon", body)


def _gap_section(table: SweepTable) -> page.Section:
  rows: list[list[page.Cell]] = [
    [row.name, *(_interval(row.gaps[name], points=True) for name in table.columns)]
    for row in table.rows
  ]
  header = ["epsilon", *(f"by {name}" for name in table.columns)]
  numbers = page.table("Largest gap in accuracy between two groups", header, rows)
  body = page.paragraph(
    "The largest difference in accuracy between two groups of a column, as the mean over seeds. "
    "Groups of few people take no part in it. It is never negative, and chance alone makes it "
    "positive; dp-jax compare gives the intervals of one pair of runs over people."
  )
  drawn = panels(table).get("largest gap in accuracy")
  if drawn:
    svg = sweep_plot.inline_plot(
      drawn, "plot-sweep-gap", "Largest gap against epsilon", "largest gap"
    )
    caption = "Largest gap between two groups against epsilon, with 95% intervals over seeds."
    body += page.plot(svg, caption)
  return page.Section("gaps", "Gaps between groups against epsilon", body + numbers)


def _cost_section(table: SweepTable) -> page.Section:
  rows: list[list[page.Cell]] = [
    [row.name, _selection(row)] for row in table.rows if row.epsilon is not None
  ]
  numbers = page.table(
    "Epsilon of one run, and of the best of a random number of runs",
    ["one run", f"the best of {table.private_runs} runs on average"], rows,
  )  # fmt: skip
  body = page.paragraph(table.statement()) + page.paragraph(_selection_note(table)) + numbers
  return page.Section("cost", "What a sweep costs on private data", body)


def _selection_note(table: SweepTable) -> str:
  return (
    "A choice that is itself private: draw the number of runs at random before any of them "
    f"(geometric, {table.private_runs} on average), let each release its score privately or take "
    "it on public data, and release the best alone (Papernot and Steinke 2021, arXiv:2110.03620)."
  )


def _note(table: SweepTable) -> str:
  plural = "s" if table.seeds > 1 else ""
  spread = (
    "Intervals are Student's, over training again with other seeds on the same records; they say "
    "nothing of other records."
    if table.seeds > 1
    else "One seed says nothing of how much the figures move from run to run."
  )
  return (
    f"{table.seeds} seed{plural} of each epsilon, delta {formatting.plain(table.delta)}. {spread}"
  )


def _header(table: SweepTable) -> list[str]:
  gaps = [f"largest gap by {name}" for name in table.columns]
  return ["epsilon", "accuracy", *gaps, f"best of {table.private_runs} on average, epsilon"]


def _cells(table: SweepTable, row: Row) -> list[str]:
  gaps = [_interval(row.gaps[name], points=True) for name in table.columns]
  return [row.name, _interval(row.accuracy), *gaps, _selection(row)]


def _selection(row: Row) -> str:
  if row.epsilon is None:
    return "no guarantee"
  return "not accounted" if row.selection is None else formatting.round_up(row.selection)


def _interval(value: Interval, *, points: bool = False) -> str:
  if not np.isfinite(value.value):
    return "too few people"
  unit = " points" if points else "%"
  text = f"{100 * value.value:.1f}{unit}"
  if not np.isfinite(value.low):
    return text
  return f"{text} ({100 * value.low:.1f} to {100 * value.high:.1f})"
