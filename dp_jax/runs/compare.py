"""`compare`: two runs on the same units, what each does to each group, and where it is written."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.errors import UserError
from dp_jax.evaluation.bootstrap import RESAMPLES
from dp_jax.evaluation.disclosure import MIN_UNITS
from dp_jax.evaluation.gaps import Comparison, compare_tables
from dp_jax.evaluation.predictions import PredictionTable, load_predictions
from dp_jax.evaluation.record_metrics import default_metrics
from dp_jax.files.atomic import write_bytes, write_text
from dp_jax.report import run_view
from dp_jax.report.comparison_page import Compared, comparison_page
from dp_jax.report.private_page import measured_sections
from dp_jax.statement import formatting
from dp_jax.training.checkpoints.workdir import WorkDir

_NOT_KEPT = (
  "The plain run kept no steps to choose from: train it with --config.eval.every=N, and the step "
  "whose accuracy is closest to that of the other run is compared here too."
)


@dataclasses.dataclass(frozen=True)
class Compare:
  """The outcome of a comparison.

  Attributes:
    private: whether either run's data were declared private: then only `path` may be shown.
    path: the page that was written.
    content: all figures, as JSON values.
    sentences: for people.
  """

  private: bool
  path: Path
  content: dict[str, Any]
  sentences: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Side:
  folder: WorkDir
  config: dict[str, Any]
  epsilon: float | None
  table: PredictionTable

  @property
  def is_private_data(self) -> bool:
    return self.config["data"].get("declared") != "public"


def compare_runs(
  first: Path,
  second: Path,
  groups: Sequence[str],
  metrics: Sequence[str] = (),
  *,
  resamples: int = RESAMPLES,
) -> Compare:
  """Compares two completed runs and writes the page into the first one's folder.

  Args:
    first: work directory of a run with privacy.
    second: that of another run on the same data, as a rule without privacy.
    groups: columns of data.groups, or "class".
    metrics: names of metrics; empty for those that fit the number of classes.
    resamples: of the bootstrap.

  Returns:
    The outcome. If either run's data were declared private, the page lies under `private/`.

  Raises:
    ValueError: if a run is not there, not complete, or they cannot be paired.
  """
  sides = _side(first), _side(second)
  if sides[0].epsilon is None:
    raise UserError(f"{str(first)!r} is no run with privacy: give that one first.")
  table = sides[0].table
  private = any(side.is_private_data for side in sides)
  names = metrics or default_metrics(table)

  def compare(other: PredictionTable, labels: tuple[str, str]) -> list[Comparison]:
    return [
      compare_tables(
        (table, other), labels, groups, name, private=private,
        class_names=table.about.get("class_names", ()), resamples=resamples,
      )
      for name in names
    ]  # fmt: skip

  labels = _labels(sides)
  final = compare(sides[1].table, labels)
  kept = _closest(sides[1], _accuracy(table))
  matched, note = [], _NOT_KEPT
  if kept is not None:
    step = kept.about["step"]
    note = f"step {step} of the run with {labels[1]}, whose accuracy is closest"
    matched = compare(kept, (labels[0], f"{labels[1]} at step {step}"))
  compared = Compared(
    data=data_name(sides[0].config["data"]), split=str(table.about.get("split", "")),
    unit=str(table.about.get("unit", "record")),
    units=table.num_units if not private or table.num_units >= MIN_UNITS else 0,
    resamples=resamples, groups=tuple(groups), private=private, final=final, matched=matched,
    matched_note=note,
  )  # fmt: skip
  return _write(sides, compared)


def _write(sides: tuple[_Side, _Side], compared: Compared) -> Compare:
  folder = sides[0].folder
  content = {
    "data": compared.data, "split": compared.split, "unit": compared.unit,
    "units": compared.units, "resamples": compared.resamples,
    "comparisons": [c.to_dict() for c in compared.final],
    "matched": {"note": compared.matched_note, "comparisons": [
      c.to_dict() for c in compared.matched
    ]},
  }  # fmt: skip
  target = (folder.private if compared.private else folder.path) / "comparison.html"
  try:
    if compared.private:
      folder.private.mkdir(mode=0o700, exist_ok=True)
      # The one page of what was measured on private data: what the report may not show goes there.
      runs = [
        run_view.load(side.folder.path, label, inside=True)
        for side, label in zip(sides, compared.final[0].labels, strict=True)
      ]
      further = measured_sections(runs[0], runs[1:], compared=compared.groups)
      write_bytes(target, comparison_page(compared, further).encode())
      write_bytes(target.with_suffix(".json"), (json.dumps(content, indent=2) + "\n").encode())
    else:
      write_text(target, comparison_page(compared))
      write_text(target.with_suffix(".json"), json.dumps(content, indent=2) + "\n")
  except OSError as error:
    raise UserError(f"cannot write {str(target)!r}: {error.strerror}.") from error
  sentences = []
  for title, comparisons in (("", compared.final), ("At equal accuracy: ", compared.matched)):
    for comparison in comparisons:
      sentences += [f"{title}{comparison.summary()}", *(c.sentence for c in comparison.changes)]
  return Compare(compared.private, target, content, tuple(sentences))


def _side(path: Path) -> _Side:
  folder = WorkDir(path)
  try:
    config = json.loads(folder.config.read_text())["config"]
    declared = config["data"].get("declared", "private")
  except (OSError, ValueError, KeyError) as error:
    raise UserError(f"{str(path)!r} is not the work directory of a run.") from error
  if not folder.predictions(declared).exists():
    raise UserError(
      f"{str(path)!r} holds no predictions: the run is not complete; the same train command"
      " completes it."
    )
  record = folder.release / "privacy.json"
  epsilon = float(json.loads(record.read_text())["epsilon"]) if record.exists() else None
  return _Side(folder, config, epsilon, load_predictions(folder.predictions(declared)))


def data_name(data: Mapping[str, Any]) -> str:
  """The name of the file or folder, or of the source that needs none."""
  path = data.get("path")
  return Path(path).stem if path else str(data["source"])


def _labels(sides: tuple[_Side, _Side]) -> tuple[str, str]:
  first, second = (
    "no privacy" if side.epsilon is None else f"epsilon {formatting.round_up(side.epsilon)}"
    for side in sides
  )
  return (f"{first} (first)", f"{second} (second)") if first == second else (first, second)


def _closest(side: _Side, accuracy: float) -> PredictionTable | None:
  """Of the steps that a plain run kept and its end, the one of the closest overall accuracy."""
  if side.epsilon is not None:
    return None
  paths = side.folder.private.glob("step_*_predictions.npz")
  tables = [load_predictions(path) for path in sorted(paths)]
  if not tables:
    return None
  return min([*tables, side.table], key=lambda table: abs(_accuracy(table) - accuracy))


def _accuracy(table: PredictionTable) -> float:
  known = table.label >= 0
  return float(np.mean(table.predicted[known] == table.label[known])) if known.any() else 0.0
