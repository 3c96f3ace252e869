"""The report's section on calibration; of private data, on the page under private/ alone."""

from __future__ import annotations

from collections.abc import Sequence

from dp_jax.evaluation.disclosure import MIN_UNITS
from dp_jax.report import page, plots
from dp_jax.report.page import Section
from dp_jax.report.run_view import RunView, number
from dp_jax.statement import formatting


def calibration_section(runs: Sequence[RunView]) -> Section | None:
  """Reliability diagram and expected calibration error."""
  private = any(run.declared != "public" for run in runs)
  bins = {run.label: found for run in runs if (found := _bins(run, private))}
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
  if private:
    text += page.paragraph(
      f"Bins of fewer than {MIN_UNITS} records are left out, with the next larger ones where the"
      " totals would give them away."
    )
  table = page.table("Expected calibration error", ["run", "error"], errors)
  caption = "Accuracy against confidence; the area of a dot grows with its records."
  body = page.columns(page.plot(svg, caption, numbers), text + table)
  return Section("calibration", "Calibration", body)


def _bins(run: RunView, private: bool) -> list[tuple[float, float, int]]:
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
  return _large_enough(found) if private else found


def _large_enough(bins: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
  """Without small bins, and without so many more that what is left out is not small itself."""
  by_size = sorted(bins, key=lambda each: each[2])
  left_out = 0
  while by_size and (by_size[0][2] < MIN_UNITS or 0 < left_out < MIN_UNITS):
    left_out += by_size.pop(0)[2]
  return sorted(by_size)


def _calibration_error(bins: Sequence[tuple[float, float, int]]) -> float:
  total = sum(count for *_, count in bins)
  return sum(count * abs(accuracy - confidence) for confidence, accuracy, count in bins) / total
