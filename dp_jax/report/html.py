"""report.html: one page that stands alone, made from what a run released."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dp_jax.report import (
  accuracy_sections,
  atomic,
  calibration_section,
  page,
  run_view,
  schema,
  sections,
)
from dp_jax.report.run_view import RunView

WITHHELD = (
  "The data were declared private. This page therefore shows what the guarantee covers and nothing "
  "else: accuracy, losses and comparisons with other runs depend on the data, carry no noise, and "
  "stay with those who hold the data."
)


def render_report(workdir: str | os.PathLike[str], compare: Mapping[str, Path]) -> Path:
  """Writes `workdir/report.html`.

  The page needs no network and no script. For data declared private it depends on config.json and
  release/privacy.json alone: neither metrics nor other runs are read.

  Args:
    workdir: of a run, with or without privacy.
    compare: label to the work directory of another run on the same data, such as
      {"plain": ..., "scratch": ...}; runs whose data were not declared public are left out.

  Returns:
    The path of the page, replaced atomically.

  Raises:
    ValueError: if config.json or privacy.json is missing, unreadable or malformed.
    OSError: if the page cannot be written.
  """
  folder = Path(workdir)
  name = "private" if (folder / "release" / "privacy.json").exists() else "plain"
  main = run_view.load(folder, name if name not in compare else "this run")
  if main.record is not None:
    found = schema.problems(main.record)
    if found:
      raise ValueError(f"{folder}/release/privacy.json is malformed: {found[0]}")
  others: list[RunView] = []
  if main.declared == "public":
    others = [run_view.load(Path(path), label) for label, path in compare.items()]
    others = [run for run in others if run.declared == "public"]
  target = folder / "report.html"
  atomic.write_text(target, _render(main, others))
  return target


def _render(main: RunView, others: list[RunView]) -> str:
  record = dict(main.record) if main.record is not None else None
  tiles = sections.guarantee_tiles(record) if record is not None else []
  found = [sections.statement_section(main)]
  if record is not None:
    found.append(sections.attacker_section(record))
  if main.declared == "public":
    runs = [main, *others]
    tiles += accuracy_sections.accuracy_tiles(main, others)
    optional = [
      accuracy_sections.accuracy_section(runs),
      accuracy_sections.cost_section(main, others),
      sections.epsilon_section(record) if record is not None else None,
      accuracy_sections.class_section(runs),
      accuracy_sections.confusion_section(main),
      calibration_section.calibration_section(runs),
    ]
    found += [section for section in optional if section is not None]
  else:
    found.append(page.Section("withheld", "What is not shown", page.paragraph(WITHHELD)))
    if record is not None:
      found.append(sections.epsilon_section(record))
  if record is not None:
    found += [sections.details_section(record), sections.evaluation_section(record)]
  found += [
    sections.setup_section(main),
    sections.verify_section(record),
    sections.cite_section(record),
  ]
  header = sections.hero(main) + (page.tiles(tiles) if tiles else "")
  return page.document(sections.page_title(main), header, found, page.paragraph(_footer(record)))


def _footer(record: dict | None) -> str:
  if record is None:
    return "Written by dp_jax. This run gives no privacy guarantee."
  return f"Written by dp_jax {record['software'].get('dp_jax', '')} from privacy.json."
