"""The report's section on calibration; of private data, on the page under private/ alone."""

from __future__ import annotations

from collections.abc import Sequence

from dp_jax.report import formatting, page, plots
from dp_jax.report.page import Section
from dp_jax.report.run_view import RunView, number


def calibration_section(runs: Sequence[RunView]) -> Section | None:
  """Reliability diagram and expected calibration error."""
  bins = {run.label: _bins(run) for run in runs if _bins(run)}
  if not bins:
    return None
  svg = plots.calibration_plot({formatting.one_line(k, 24): v for k, v in bins.items()})
  rows: list[list[page.Cell]] = [
    [label, formatting.percent(confidence), formatting.percent(accuracy), formatting.count(count)]
    for label, values in bins.items()
    for confidence, accuracy, count in values
  ]
  numbers = page.table("Calibration, by bin", ["run", "confidence", "accuracy", "records"], rows)
  errors: list[list[page.Cell]] = [
    [label, formatting.percent(_calibration_error(values))] for label, values in bins.items()
  ]
  text = page.paragraph(
    "On the diagonal a model is as often right as it says. Below it, the model is too sure of "
    "itself; above it, not sure enough. The expected calibration error is the mean distance from "
    "the diagonal, weighted by records."
  )
  table = page.table("Expected calibration error", ["run", "error"], errors)
  caption = "Accuracy against confidence; the area of a dot grows with its records."
  body = page.columns(page.plot(svg, caption, numbers), text + table)
  return Section("calibration", "Calibration", body)


def _bins(run: RunView) -> list[tuple[float, float, int]]:
  calibration = run.final.get("calibration")
  if not isinstance(calibration, dict):
    return []
  triples = zip(
    calibration.get("confidence", []),
    calibration.get("accuracy", []),
    calibration.get("count", []),
    strict=False,
  )
  found = []
  for confidence, accuracy, count in triples:
    values = number(confidence), number(accuracy), number(count)
    if values[0] is not None and values[1] is not None and values[2]:
      found.append((values[0], values[1], int(values[2])))
  return found


def _calibration_error(bins: Sequence[tuple[float, float, int]]) -> float:
  total = sum(count for *_, count in bins)
  return sum(count * abs(accuracy - confidence) for confidence, accuracy, count in bins) / total
