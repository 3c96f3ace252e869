"""Metrics of a table of predictions as functions of the weights of units."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dp_jax.errors import UserError
from dp_jax.evaluation.bootstrap import Statistic, auroc_statistic, ratio_statistic
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.scores import finite_scores
from dp_jax.evaluation.subgroups import Partition, incidence


class Metric(NamedTuple):
  """A metric of records.

  Attributes:
    title: for people.
    higher_is_better: False for losses and error rates.
    binary: whether it needs two classes, or several labels of yes or no.
    percent: whether to show it as a percentage.
  """

  title: str
  higher_is_better: bool = True
  binary: bool = False
  percent: bool = True


METRICS = {
  "accuracy": Metric("accuracy"),
  "auroc": Metric("AUROC", binary=True, percent=False),
  "true_positive_rate": Metric("true positive rate", binary=True),
  "false_positive_rate": Metric("false positive rate", higher_is_better=False, binary=True),
  "loss": Metric("cross-entropy", higher_is_better=False, percent=False),
}
# Means of what is 0 or 1 for each record.
SHARES = ("accuracy", "true_positive_rate", "false_positive_rate")


def default_metrics(table: PredictionTable) -> tuple[str, ...]:
  """AUROC and accuracy of yes-or-no questions, accuracy of more classes."""
  return ("auroc", "accuracy") if table.is_binary or table.has_several_labels else ("accuracy",)


def check_metrics(names: Sequence[str], table: PredictionTable) -> None:
  """Refuses metrics that are unknown or not defined for the table.

  Raises:
    ValueError: names the metric and those that there are.
  """
  yes_or_no = table.is_binary or table.has_several_labels
  known = [name for name, metric in METRICS.items() if yes_or_no or not metric.binary]
  for name in names:
    if name not in METRICS:
      raise UserError(f"unknown metric {name!r}; one of {', '.join(known)}.")
    if name not in known:
      raise UserError(f"{name} needs two classes; here one of {', '.join(known)}.")


def statistic_of(
  name: str, table: PredictionTable, units: np.ndarray, num_units: int, parts: Sequence[Partition]
) -> Statistic:
  """A metric in every group of every partition, one after the other.

  Of several labels AUROC is the mean over those that have both yes and no in the group, and the
  other metrics count every known label.

  Args:
    name: of METRICS.
    table: the predictions.
    units: int[n], the unit of each record, in 0..num_units - 1.
    num_units: how many units there are.
    parts: partitions of the records.
  """
  if name == "auroc":
    return _auroc(table, units, parts)
  numerator, denominator = _ratio(name, table)
  return ratio_statistic(
    numerator, denominator, units, num_units, parts[-1].codes, incidence(parts)
  )


def _auroc(table: PredictionTable, units: np.ndarray, parts: Sequence[Partition]) -> Statistic:
  count = len(table.label)
  targets, scores = table.label.reshape(count, -1), table.score.reshape(count, -1)
  each = [
    [
      auroc_statistic(
        target == 1, finite_scores(score, target), units, np.where(target < 0, -1, part.codes),
        len(part.groups),
      )
      for part in parts
    ]
    for target, score in zip(targets.T, scores.T, strict=True)
  ]  # fmt: skip

  def statistic(weights: np.ndarray) -> np.ndarray:
    areas = np.stack([np.concatenate([one(weights) for one in label], axis=1) for label in each])
    defined = np.isfinite(areas)
    with np.errstate(invalid="ignore"):
      return np.where(defined, areas, 0.0).sum(axis=0) / defined.sum(axis=0)

  return statistic


def _ratio(name: str, table: PredictionTable) -> tuple[np.ndarray, np.ndarray]:
  """Numerator and denominator of each record, float[n]."""
  counted = table.label >= 0
  if name == "loss":
    top = np.where(counted, table.losses(), 0.0)
  elif name == "accuracy":
    top = counted & (table.predicted == table.label)
  else:
    counted = table.label == (1 if name == "true_positive_rate" else 0)
    top = counted & (table.predicted == 1)
  return tuple(x.reshape(len(table.label), -1).sum(axis=1, dtype=float) for x in (top, counted))
