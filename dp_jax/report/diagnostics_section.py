"""The report's section on training itself: shown only where the user asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dp_jax.report import page, plots, run_view
from dp_jax.report.page import Section
from dp_jax.report.run_view import RunView, number
from dp_jax.statement import formatting

ALARM = (
  "This page holds training diagnostics, --include_private. Losses, gradient norms and clip "
  "fractions are measured on the training records without noise: no guarantee covers them, and "
  "they must not leave the hands of those who may see the data."
)
_ROWS = 20  # of the table; the plots have every step

_FIGURES = {
  "loss": ("Training loss", "mean loss of the batch", False),
  "norm_median": ("Gradient norms", "median norm of a unit", False),
  "clip_fraction": ("Units that were clipped", "share of the batch", True),
}


def diagnostics_section(run: RunView) -> Section | None:
  """Loss, norms and clip fraction of every step, from private/training.jsonl."""
  # A step that was repeated after a resume stands twice: the later line counts.
  steps = {
    int(line["step"]): line
    for line in run_view.training_log(run.folder)
    if number(line.get("step"))
  }
  lines = [steps[step] for step in sorted(steps)]
  drawn = ""
  for name, (title, unit, percent) in _FIGURES.items():
    points = [
      (int(line["step"]), value) for line in lines if (value := number(line.get(name))) is not None
    ]
    if points:
      svg = plots.progress_plot(
        {unit: points}, name=f"plot-{name.replace('_', '-')}", title=title, unit=unit,
        percent=percent,
      )  # fmt: skip
      drawn += page.plot(svg, f"{title} by step, without noise.")
  if not drawn:
    return None
  return Section(
    "diagnostics", "Training diagnostics (not private)", page.alarm("Not private.", ALARM) + drawn
    + _table(lines)
  )  # fmt: skip


def _table(lines: Sequence[dict[str, Any]]) -> str:
  places = sorted({round(k * (len(lines) - 1) / (_ROWS - 1)) for k in range(_ROWS)})
  rows: list[list[page.Cell]] = [
    [
      formatting.count(lines[i]["step"]),
      *("" if (v := number(lines[i].get(name))) is None else f"{v:.4g}" for name in _FIGURES),
    ]
    for i in places
  ]
  header = ["step", *(f"{title.lower()}" for title, *_ in _FIGURES.values())]
  caption = "Training, by step" if len(places) == len(lines) else "Training, at some of the steps"
  return page.table(caption, header, rows)
