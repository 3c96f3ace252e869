"""report.html: one page that stands alone, made from what a run released."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dp_jax.errors import UserError
from dp_jax.files import atomic
from dp_jax.report import (
  accuracy_sections,
  diagnostics_section,
  page,
  private_page,
  run_view,
  sections,
)
from dp_jax.report.run_view import RunView
from dp_jax.statement import privacy_json, schema, sentences

WITHHELD = (
  "The data were declared private. This page therefore shows what the guarantee covers and nothing "
  "else: accuracy, losses and comparisons with other runs depend on the data, carry no noise, and "
  "stay with those who hold the data."
)


def render_report(
  workdir: str | os.PathLike[str], compare: Mapping[str, Path], *, include_private: bool = False
) -> Path:
  """Writes `workdir/report.html`, and of private data `workdir/private/comparison.html` beside it.

  The pages need no network and no script. For data declared private report.html depends on
  config.json, release/privacy.json and what was released with noise alone; what was measured on
  the data goes to the other page.

  Args:
    workdir: of a run, with or without privacy.
    compare: label to the work directory of another run on the same data, such as
      {"plain": ..., "scratch": ...}; beside a run on public data, those whose data were not
      declared public are left out.
    include_private: adds training diagnostics, under a red banner, to the page that shows what was
      measured: report.html of public data, comparison.html of private data.

  Returns:
    The path of report.html, replaced atomically.

  Raises:
    ValueError: if config.json or privacy.json is missing, unreadable or malformed, or another run
      is of other data.
    OSError: if a page cannot be written.
  """
  folder = Path(workdir)
  name = "private" if (folder / "release" / "privacy.json").exists() else "plain"
  label = name if name not in compare else "this run"
  main = run_view.load(folder, label)
  if main.record is not None:
    if privacy_json.is_earlier(main.record):
      raise UserError(f"{folder}/release/{privacy_json.EARLIER}")
    found = schema.problems(main.record)
    if found:
      raise UserError(f"{folder}/release/privacy.json is malformed: {found[0]}")
  public = main.declared == "public"
  others = [run_view.load(Path(path), text, inside=not public) for text, path in compare.items()]
  inside = main if public else run_view.load(folder, label, inside=True)
  for run in others:
    run_view.check_same_data(inside, run)
  if public:
    others = [run for run in others if run.declared == "public"]
  else:
    _write_inside(inside, others, include_private)
  target = folder / "report.html"
  atomic.write_text(target, _render(main, others if public else [], include_private and public))
  return target


def private_path(workdir: Path) -> Path:
  """Where what was measured on private data is shown."""
  return workdir / "private" / "comparison.html"


def _write_inside(main: RunView, others: Sequence[RunView], include_private: bool) -> None:
  text = private_page.private_page(main, others, include_private=include_private)
  if text is not None:
    path = private_path(main.folder)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    atomic.write_bytes(path, text.encode())


def _render(main: RunView, others: Sequence[RunView], include_private: bool) -> str:
  record = dict(main.record) if main.record is not None else None
  tiles = sections.guarantee_tiles(record) if record is not None else []
  found = [sections.statement_section(main)]
  if record is not None:
    found.append(sections.attacker_section(record))
  # A solver has no steps between which something is spent.
  epsilon = (
    [] if record is None or sentences.is_solver(record) else [sections.epsilon_section(record)]
  )
  diagnostics = diagnostics_section.diagnostics_section(main) if include_private else None
  if main.declared == "public":
    tiles += accuracy_sections.accuracy_tiles(main, others)
    measured = private_page.measured_sections(main, others)
    # What privacy cost, then what it bought, then the details.
    first = sum(section.anchor in ("accuracy", "cost", "beside") for section in measured)
    found += [*measured[:first], *epsilon, *measured[first:]]
  else:
    found.append(page.Section("withheld", "What is not shown", page.paragraph(WITHHELD)))
    found += epsilon
  found += sections.released_sections(main)
  if record is not None:
    found += [sections.details_section(record), sections.evaluation_section(record)]
  found += [] if diagnostics is None else [diagnostics]
  found += [
    sections.setup_section(main),
    sections.verify_section(record),
    sections.cite_section(record),
  ]
  header = sections.hero(main) + (page.tiles(tiles) if tiles else "")
  if diagnostics is not None:
    header = page.alarm("Not private.", diagnostics_section.ALARM) + header
  return page.document(sections.page_title(main), header, found, page.paragraph(_footer(record)))


def _footer(record: dict | None) -> str:
  if record is None:
    return "Written by dp_jax. This run gives no privacy guarantee."
  return f"Written by dp_jax {record['software'].get('dp_jax', '')} from privacy.json."
