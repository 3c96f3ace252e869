"""What the report may read of a run: its config, its privacy record and its public metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dp_jax.data.sources.opening import SOURCES
from dp_jax.errors import UserError
from dp_jax.evaluation import predictions
from dp_jax.evaluation.bootstrap import Interval
from dp_jax.evaluation.intervals import wilson
from dp_jax.evaluation.predictions import PredictionTable, load_predictions

# What says which records a run was evaluated on, where it kept no predictions.
_SAME = ("source", "path", "eval_split", "seed", "num_records")


@dataclass(frozen=True)
class RunView:
  """One run as the report sees it.

  Attributes:
    folder: its work directory.
    label: how the page names the run; untrusted text.
    config: section to key to value, from config.json.
    record: the content of privacy.json; None for a run without privacy.
    declared: "public" only where every file that says anything says public.
    released: figures on held-out data that were released with noise of their own.
    split: the held-out split that `history` and `final` are of, "" without metrics.
    history: (step, metrics), by increasing step; empty for data declared private, but on the page
      that lies under private/ itself.
    final: the metrics of the completed run, with counts of each class; empty until then.
    predictions: where its predictions on the split are; None like `history`.
  """

  folder: Path
  label: str
  config: Mapping[str, Mapping[str, Any]]
  record: Mapping[str, Any] | None
  declared: str
  released: tuple[Mapping[str, Any], ...]
  split: str
  history: tuple[tuple[int, Mapping[str, Any]], ...]
  final: Mapping[str, Any]
  predictions: Path | None

  @property
  def num_records(self) -> int:
    """Held-out records behind `final`, 0 if unknown."""
    count = number(self.final.get("num_records"))
    return int(count) if count is not None and count > 0 else 0

  @cached_property
  def table(self) -> PredictionTable:
    """The predictions, read once.

    Raises:
      ValueError: if there are none, or the file is no such table.
    """
    if self.predictions is None:
      raise UserError("no predictions are kept")
    return load_predictions(self.predictions)

  def accuracy(self) -> Interval | None:
    """Accuracy on the held-out split with its 95% Wilson interval, None if unknown."""
    value = number(self.final.get("accuracy"))
    if value is None or not self.num_records:
      return None
    return wilson(value, self.num_records)

  def source(self) -> str:
    """What to call the data: a name of their own, or that of their file if they are public."""
    data = self.config.get("data", {})
    source, path = str(data.get("source", "unnamed data")), data.get("path")
    holds = SOURCES[source].HOLDS if source in SOURCES else ""
    if not holds:
      return source
    if self.declared == "public" and path:
      return Path(str(path)).name
    return f"{self.declared.capitalize()} {holds}"


def load(workdir: Path, label: str, *, inside: bool = False) -> RunView:
  """Reads a work directory; looks into private/ only if told to, never into unprotected/.

  Args:
    workdir: of a run, complete or not.
    label: how the page names it.
    inside: for a page that stays under private/: what was measured on private data is read too.

  Raises:
    ValueError: if the folder holds no readable config.json, or privacy.json is not JSON.
  """
  config = _read_json(workdir / "config.json", "is this the work directory of a run?")["config"]
  record_path = workdir / "release" / "privacy.json"
  record = _read_json(record_path, "rebuild the release") if record_path.exists() else None
  said = [config.get("data", {}).get("declared", "private")]
  if record is not None:
    said.append(record.get("declared", "private"))
  declared = "public" if all(word == "public" for word in said) else "private"
  released = tuple(_lines(workdir / "released_metrics.jsonl"))
  if declared != "public" and not inside:
    return RunView(workdir, label, config, record, declared, released, "", (), {}, None)
  folder = workdir if declared == "public" else workdir / "private"
  split, history, final = _metrics(folder / "metrics.jsonl")
  predictions = folder / "predictions.npz"
  return RunView(
    workdir, label, config, record, declared, released, split, history, final,
    predictions if predictions.exists() else None,
  )  # fmt: skip


def check_same_data(main: RunView, other: RunView) -> None:
  """Refuses to set a run beside one of other data: what they differ by is not the training.

  By the predictions of both, or where one has none by what the configurations say.

  Raises:
    ValueError: naming the other run, and what differs.
  """
  if main.declared == "public" != other.declared:
    return  # nothing of the other is shown
  try:
    tables = [main.table, other.table]
  except ValueError:  # none are kept, or they cannot be read
    tables = []
  if tables:
    try:
      predictions.check_same_data(tables)
    except ValueError as error:
      raise UserError(
        f"{other.label!r} ({other.folder}) cannot be set beside {main.folder}: {error}"
      ) from error
    return
  sides = [{name: _said(run, name) for name in _SAME} for run in (main, other)]
  differences = [
    f"data.{name} is {sides[0][name]!r} here and {sides[1][name]!r} there"
    for name in _SAME
    if sides[0][name] != sides[1][name]
  ]
  counts = [run.num_records for run in (main, other)]
  if all(counts) and counts[0] != counts[1]:
    differences.append("the numbers of held-out records differ")
  if differences:
    raise UserError(
      f"{other.label!r} ({other.folder}) is a run on other data than {main.folder}:"
      f" {'; '.join(differences)}."
    )


def _said(run: RunView, name: str) -> Any:
  """What a run's configuration says of its data; of a path the name, since folders are moved."""
  value = run.config.get("data", {}).get(name)
  return Path(str(value)).name if name == "path" and value is not None else value


def training_log(workdir: Path) -> list[dict[str, Any]]:
  """What the steps saw: losses and norms without noise, never to be shown unless asked for."""
  return _lines(workdir / "private" / "training.jsonl")


def number(value: Any) -> float | None:
  """The value as a float if it is a finite number, else None."""
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
    return None
  return float(value)


def _read_json(path: Path, advice: str) -> dict[str, Any]:
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"cannot read {path} ({error.strerror}); {advice}") from error
  except ValueError as error:
    raise UserError(f"{path} is not JSON ({error}); {advice}") from error
  if not isinstance(content, dict):
    raise UserError(f"{path} holds no JSON object; {advice}")
  return content


def _metrics(
  path: Path,
) -> tuple[str, tuple[tuple[int, Mapping[str, Any]], ...], Mapping[str, Any]]:
  """The held-out split's history and final metrics."""
  lines = [line for line in _lines(path) if line.keys() >= {"step", "split", "metrics"}]
  held_out = sorted({line["split"] for line in lines if line["split"] != "train"})
  if not held_out:
    return "", (), {}
  split = "test" if "test" in held_out else held_out[0]
  # A step that was repeated after a resume stands twice: the later line counts.
  steps = {int(line["step"]): line["metrics"] for line in lines if line["split"] == split}
  finals = [line["metrics"] for line in lines if line["split"] == split and line.get("final")]
  return split, tuple(sorted(steps.items())), finals[-1] if finals else {}


def _lines(path: Path) -> list[dict[str, Any]]:
  """The JSON objects of a log, one a line; none without the file, and without a torn last line."""
  if not path.exists():
    return []
  lines = []
  for text in path.read_text(encoding="utf-8").splitlines():
    try:
      lines.append(json.loads(text))
    except ValueError:
      continue
  return [line for line in lines if isinstance(line, dict)]
