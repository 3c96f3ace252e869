"""One class made rare: what privacy does to it, beside what it does to all.

    python -m experiments.imbalance.study --config=experiments/imbalance/config.py \
      --config.data.path=mnist.npz --label=8 --folder=runs/imbalance

For each share of the class that is kept, each epsilon and each seed, a private run and one without
privacy; accuracy of the class against that of all records, also at the step of the plain run whose
overall accuracy is closest to the private one's; and the order of the classes by difficulty against
epsilon, on the data as they are. Any configuration will do whose data are public (images or
features, `tfds:cifar10`, `npz`, `folder`). Runs that are complete are kept.

Berrada et al. 2023, arXiv:2308.10888, compare at equal accuracy: that a worse model is worse on a
rare class too says nothing of privacy.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags
from scipy import stats

from dp_jax.config.run_config import Config
from dp_jax.data.sources.source import RecordError, Source
from dp_jax.evaluation.predictions import PredictionTable, load_predictions
from dp_jax.evaluation.seeds import over_seeds
from dp_jax.statement import formatting
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.run import train
from dp_jax.training.setup.open_data import open_split

_CONFIG = config_flags.DEFINE_config_file("config", None, "config file", lock_config=True)
_LABEL = flags.DEFINE_integer("label", 8, "the class that is made rare")
_SHARES = flags.DEFINE_list("shares", ["0.1", "0.25", "0.5", "1"], "how much of it is kept")
_EPSILONS = flags.DEFINE_list("epsilons", ["0.5", "2"], "targets of the private runs")
_SEEDS = flags.DEFINE_integer("seeds", 3, "runs of each")
_FOLDER = flags.DEFINE_string("folder", "runs/imbalance", "where data and runs go")
_OUT = flags.DEFINE_string("out", None, "JSON file for the results")

# Records that are read at a time.
_READ = 4096


@dataclasses.dataclass(frozen=True)
class Point:
  """One run, or one step of a plain one.

  Attributes:
    share: of the class that was kept.
    epsilon: None without privacy.
    seed: of the initial model, and of which records of the class were kept.
    overall: accuracy on all held-out records.
    classes: accuracy on those of each class.
    matched: of a private run, the accuracies (overall, of the rare class) of the plain run of that
      share and seed at the step where its overall accuracy is closest; None without privacy.
  """

  share: float
  epsilon: float | None
  seed: int
  overall: float
  classes: tuple[float, ...]
  matched: tuple[float, float] | None


def run_study(
  config: Config, folder: Path, label: int, shares: Sequence[float],
  epsilons: Sequence[float], seeds: int,
) -> list[Point]:  # fmt: skip
  """Trains what is not there yet, and returns a point for each run.

  Raises:
    ValueError: if the data are not declared public, or a share or the class makes no sense.
  """
  if config.data.declared != "public":
    raise ValueError("the study publishes accuracies without noise: its data must be public.")
  if any(not 0 < share <= 1 for share in shares):
    raise ValueError(f"shares {list(shares)} must lie in (0, 1].")
  points = []
  for seed in range(seeds):
    for share in shares:
      made = folder / f"share_{share:g}" / f"seed_{seed}"
      here = with_rare_class(config, made, label, share, seed)
      plain = _train(here, None, made / "plain")
      points.append(_point(share, None, seed, plain[-1], None))
      for epsilon in epsilons:
        (table,) = _train(here, epsilon, made / f"epsilon_{epsilon:g}")
        closest = min(plain, key=lambda kept: abs(_accuracy(kept) - _accuracy(table)))
        matched = _accuracy(closest), _of_classes(closest)[label]
        points.append(_point(share, epsilon, seed, table, matched))
  return points


def with_rare_class(config: Config, folder: Path, label: int, share: float, seed: int) -> Config:
  """The configuration on a copy of the data in which the class is rare.

  Args:
    config: of data of any source whose records all have one shape.
    folder: gets the copy, train.npz and test.npz.
    label: the class.
    share: of its training records that is kept.
    seed: picks them.
  """
  source = open_split(config, config.data.train_split)
  if not (folder / "train.npz").exists():
    folder.mkdir(parents=True, exist_ok=True)
    inputs, labels = _read(source)
    if not (labels == label).any():
      raise ValueError(f"there is no training record of class {label}.")
    kept = np.ones(len(labels), bool)
    members = np.random.default_rng(seed).permutation(np.flatnonzero(labels == label))
    kept[members[max(1, round(share * len(members))) :]] = False
    _write(folder / "test.npz", *_read(open_split(config, config.data.eval_split)))
    _write(folder / "train.npz", inputs[kept], labels[kept])
  values = config.to_dict()
  values["seed"] = seed
  values["data"] |= {
    "source": "npz", "path": str(folder), "train_split": "train", "eval_split": "test",
    "num_classes": config.data.num_classes or source.info.num_classes,
    "value_range": list(config.data.value_range or source.info.value_range or ()) or None,
    "num_records": None, "class_names": None, "groups": None, "group_bins": None,
  }  # fmt: skip
  return Config.from_dict(values)


def _read(source: Source) -> tuple[np.ndarray, np.ndarray]:
  inputs, labels = [], []
  for start in range(0, len(source), _READ):
    records = source.gather(np.arange(start, min(start + _READ, len(source))))
    if isinstance(records, dict):
      inputs.append(records["inputs"])
      labels.append(records["label"])
      continue
    for record in records:
      if isinstance(record, RecordError):
        raise ValueError(f"{source.info.name} holds a record that cannot be read: {record}")
      inputs.append(record["inputs"][None])
      labels.append(np.array([record["label"]]))
  return np.concatenate(inputs), np.concatenate(labels)


def _write(path: Path, inputs: np.ndarray, labels: np.ndarray) -> None:
  """Whole or not at all, so that a killed study does not go on with half of a file."""
  temporary = path.with_name(f".{path.name}.tmp.npz")
  arrays = {"features" if inputs.ndim == 2 else "image": inputs, "label": labels}
  np.savez(temporary, **arrays)
  temporary.replace(path)


def _train(config: Config, epsilon: float | None, folder: Path) -> list[PredictionTable]:
  """Predictions of the final model, last; of a plain run those of its kept steps before them."""
  values = config.to_dict()
  values["privacy"] |= {"enabled": epsilon is not None, "epsilon": epsilon}
  run, there = Config.from_dict(values), WorkDir(folder)
  if not there.result.exists():
    train(run, folder, label="/".join(folder.parts[-3:]))
  kept = [] if epsilon is not None else sorted(there.private.glob("step_*_predictions.npz"))
  return [load_predictions(path) for path in (*kept, there.predictions("public"))]


def _accuracy(table: PredictionTable) -> float:
  return float(np.mean(table.predicted == table.label))


def _of_classes(table: PredictionTable) -> tuple[float, ...]:
  right = table.predicted == table.label
  count = int(table.label.max()) + 1
  return tuple(
    float(np.mean(right[table.label == k])) if (table.label == k).any() else float("nan")
    for k in range(count)
  )


def _point(
  share: float, epsilon: float | None, seed: int, table: PredictionTable,
  matched: tuple[float, float] | None,
) -> Point:  # fmt: skip
  return Point(share, epsilon, seed, _accuracy(table), _of_classes(table), matched)


def rare_table(points: Sequence[Point], label: int) -> str:
  """Accuracy of the rare class against that of all records, as Markdown."""
  lines = [
    "| kept of the class | epsilon | all records | the class | at that accuracy without privacy |"
    " difference, points |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for share, epsilon in dict.fromkeys((p.share, p.epsilon) for p in points):
    own = [p for p in points if (p.share, p.epsilon) == (share, epsilon)]
    matched = [p.matched for p in own if p.matched is not None]
    cells = [_mean([p.overall for p in own]), _mean([p.classes[label] for p in own]), "", ""]
    if matched:
      cells[2] = f"{_mean([m[1] for m in matched])} (all: {_mean([m[0] for m in matched])})"
      apart = [p.classes[label] - m[1] for p, m in zip(own, matched, strict=True)]
      cells[3] = _mean(apart, signed=True)
    name = "none" if epsilon is None else f"{epsilon:g}"
    lines.append(f"| {formatting.percent(share, 0)} | {name} | {' | '.join(cells)} |")
  return "\n".join(lines)


def difficulty(points: Sequence[Point]) -> dict[str, Any]:
  """Of the data as they are: classes from hard to easy for each epsilon, beside no privacy.

  Returns:
    For each epsilon ("none" without privacy) the mean accuracy of each class, its order, and the
    rank correlation with the order without privacy.
  """
  whole = [p for p in points if p.share == 1]
  found: dict[str, Any] = {}
  for epsilon in dict.fromkeys(p.epsilon for p in whole):
    means = np.mean([p.classes for p in whole if p.epsilon == epsilon], axis=0)
    name = "none" if epsilon is None else f"{epsilon:g}"
    order = [int(k) for k in np.argsort(means, kind="stable")]
    found[name] = {"accuracy": means.tolist(), "hard_to_easy": order}
  if "none" in found:
    plain = found["none"]["accuracy"]
    for each in found.values():
      each["rank_correlation"] = float(stats.spearmanr(plain, each["accuracy"]).statistic)
  return found


def difficulty_table(found: dict[str, Any]) -> str:
  """The same as Markdown."""
  lines = ["| epsilon | classes, hard to easy | rank correlation |", "| --- | --- | --- |"]
  for name, each in found.items():
    order = " ".join(
      f"{k} ({formatting.percent(each['accuracy'][k], 0)})" for k in each["hard_to_easy"]
    )
    correlation = each.get("rank_correlation")
    lines.append(f"| {name} | {order} | {'' if correlation is None else f'{correlation:.2f}'} |")
  return "\n".join(lines)


def _mean(values: Sequence[float], *, signed: bool = False) -> str:
  """Percent, or points with a sign, with half of the 95% interval over seeds."""
  found = over_seeds(values)
  half = "" if np.isnan(found.low) else f" ± {100 * (found.high - found.value):.1f}"
  value = f"{100 * found.value:+.1f}" if signed else formatting.percent(found.value)
  return f"{value}{half}"


def main(argv: list[str]) -> None:
  """Runs the study and prints its tables."""
  if len(argv) > 1 or _CONFIG.value is None:
    raise app.UsageError("give --config=FILE and no arguments")
  logging.set_verbosity(logging.WARNING)  # orbax narrates every file at INFO
  shares, epsilons = ([float(text) for text in texts] for texts in (_SHARES.value, _EPSILONS.value))
  config, label = Config.from_dict(_CONFIG.value.to_dict()), _LABEL.value
  points = run_study(config, Path(_FOLDER.value), label, shares, epsilons, _SEEDS.value)
  order = difficulty(points)
  print(f"{rare_table(points, label)}\n\n{difficulty_table(order)}")
  if _OUT.value:
    content = {
      "label": label, "seeds": _SEEDS.value, "difficulty": order,
      "points": [dataclasses.asdict(point) for point in points],
    }  # fmt: skip
    Path(_OUT.value).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
  app.run(main)
