"""Metrics of a table of predictions as functions of the weights of units."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dp_jax.evaluation.bootstrap import Statistic, auroc_statistic, ratio_statistic
from dp_jax.evaluation.classification import cross_entropy
from dp_jax.evaluation.groups import Partition
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.scores import finite_scores


class Metric(NamedTuple):
  """A metric of records.

  Attributes:
    title: for people.
    higher_is_better: False for losses and error rates.
    binary: whether it needs two classes.
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


def default_metrics(table: PredictionTable) -> tuple[str, ...]:
  """AUROC and accuracy of two classes, accuracy of more."""
  return ("auroc", "accuracy") if table.is_binary else ("accuracy",)


def check_metrics(names: Sequence[str], table: PredictionTable) -> None:
  """Refuses metrics that are unknown or not defined for the table.

  Raises:
    ValueError: names the metric and those that there are.
  """
  known = [name for name, metric in METRICS.items() if table.is_binary or not metric.binary]
  for name in names:
    if name not in METRICS:
      raise ValueError(f"unknown metric {name!r}; one of {', '.join(known)}.")
    if name not in known:
      raise ValueError(f"{name} needs two classes; here one of {', '.join(known)}.")


def statistic_of(
  name: str, table: PredictionTable, units: np.ndarray, num_units: int, parts: Sequence[Partition]
) -> Statistic:
  """A metric in every group of every partition, one after the other.

  Args:
    name: of METRICS.
    table: the predictions.
    units: int[n], the unit of each record, in 0..num_units - 1.
    num_units: how many units there are.
    parts: partitions of the records.
  """
  if name == "auroc":
    score = finite_scores(table.score, table.label)
    each = [
      auroc_statistic(table.label == 1, score, units, part.codes, len(part.groups))
      for part in parts
    ]
    return lambda weights: np.concatenate([one(weights) for one in each], axis=1)
  numerator, denominator = _ratio(name, table)
  members = [part.codes == code for part in parts for code in range(len(part.groups))]
  return ratio_statistic(numerator, denominator, units, num_units, members)


def _ratio(name: str, table: PredictionTable) -> tuple[np.ndarray, np.ndarray]:
  everyone = np.ones(len(table.label), bool)
  if name == "loss":
    return cross_entropy(table.label_probability.astype(np.float64)), everyone
  if name == "accuracy":
    return table.predicted == table.label, everyone
  actual = table.label == (1 if name == "true_positive_rate" else 0)
  return actual & (table.predicted == 1), actual
