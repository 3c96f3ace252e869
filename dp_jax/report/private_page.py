"""private/comparison.html: what was measured on private data, for those who may see them."""

from __future__ import annotations

from collections.abc import Sequence

from dp_jax.evaluation.disclosure import MIN_UNITS
from dp_jax.report import (
  accuracy_sections,
  calibration_section,
  class_sections,
  diagnostics_section,
  group_sections,
  page,
)
from dp_jax.report.comparison_page import PRIVATE
from dp_jax.report.page import Section
from dp_jax.report.run_view import RunView


def measured_sections(
  main: RunView, others: Sequence[RunView], *, compared: Sequence[str] | None = None
) -> list[Section]:
  """What was measured on held-out records: accuracy, cost, groups, classes, calibration.

  Args:
    main: the run that the page is of.
    others: runs on the same data beside it.
    compared: the columns whose groups the page shows already; None for sections on data.groups.
  """
  runs = [main, *others]
  private = any(run.declared != "public" for run in runs)
  if private and any(map(_has_too_few, runs)):
    return []
  found = [
    accuracy_sections.accuracy_section(runs),
    accuracy_sections.cost_section(main, others),
    accuracy_sections.beside_section(main, others),
  ]
  if compared is None:
    groups = group_sections.group_sections(main, others)
    found += groups
    shown = any(section.anchor != group_sections.NOT_SHOWN for section in groups)
    compared = main.config["data"]["groups"] if shown else ()
  hidden = class_sections.hidden_on_page(runs, compared)
  found += [
    class_sections.class_section(runs, hidden),
    class_sections.confusion_section(main, hidden[0], private),
    calibration_section.calibration_section(runs),
  ]
  return [section for section in found if section is not None]


def _has_too_few(run: RunView) -> bool:
  """Whether so few people were held out that no figure on all private ones may be shown."""
  try:
    return run.table.num_units < MIN_UNITS
  except ValueError:  # no predictions in the file: the sections that need them say so
    return False


def private_page(main: RunView, others: Sequence[RunView], *, include_private: bool) -> str | None:
  """The page; None if there is nothing to show yet.

  Args:
    main: the run, loaded from inside its folder.
    others: the runs beside it, loaded likewise.
    include_private: whether training diagnostics were asked for.
  """
  found = measured_sections(main, others)
  diagnostics = diagnostics_section.diagnostics_section(main) if include_private else None
  found += [] if diagnostics is None else [diagnostics]
  if not found:
    return None
  title = f"{main.source()}: what was measured on private data"
  header = f'<p class="kind">Not released</p><h1>{page.escape(title, 160)}</h1>'
  if diagnostics is not None:
    header += page.alarm("Not private.", diagnostics_section.ALARM)
  header += page.callout("Not covered by the guarantee.", PRIVATE)
  footer = page.paragraph("Written by dp_jax.")
  return page.document(f"Measured on private data: {main.source()}", header, found, footer)
