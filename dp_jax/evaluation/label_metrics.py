"""Metrics of several yes-or-no labels a record, as functions of a table of predictions.

A label that is not known counts nowhere.
"""

from typing import Any

import numpy as np
from scipy.special import expit

from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.scores import ranking_metrics

RANKS = ("auroc", "average_precision")


def label_rows(
  probabilities: np.ndarray, labels: np.ndarray, logits: np.ndarray | None = None
) -> dict[str, np.ndarray]:
  """The columns of a table of several labels, each [n, num_labels].

  Args:
    probabilities: float[n, num_labels], of yes.
    labels: [n, num_labels]: 1, 0, or -1 for not known.
    logits: of that shape; None, or no column, ranks by probabilities, which saturate.
  """
  labels = labels.astype(np.int32)
  probabilities = np.array(probabilities, np.float32)
  failed = ~np.isfinite(probabilities)
  predicted = np.where(failed, labels != 1, probabilities > 0.5)
  chosen, score = np.where(labels == 1, probabilities, 1 - probabilities), probabilities
  if logits is not None and logits.shape[1]:  # 1 - p is 0 long before the other probability is
    chosen = expit(np.where(labels == 1, logits, -logits).astype(np.float64))
    score = np.where(failed, np.nan, np.array(logits, np.float32))
  return {
    "label": labels,
    "predicted": predicted.astype(np.int32),
    "label_probability": np.where(failed, 0.0, chosen).astype(np.float32),
    "score": score.astype(np.float32),
  }


def label_scalars(table: PredictionTable) -> dict[str, float | None]:
  """`accuracy` and `loss` over known labels; AUROC and average precision, means over labels."""
  known = table.label >= 0
  count = int(known.sum())
  right = int(((table.predicted == table.label) & known).sum())
  losses = np.where(known, table.losses(), 0.0)
  ranks = ranks_of_labels(table.score, table.label)
  return {
    "accuracy": right / count if count else None,
    "loss": float(losses.sum() / count) if count else None,
    **{name: ranks[name] for name in RANKS},
  }


def label_details(table: PredictionTable) -> dict[str, Any]:
  """The scalars, and AUROC and average precision of each label and of all together (micro)."""
  return {
    **ranks_of_labels(table.score, table.label),
    **label_scalars(table),
    "num_records": len(table.label),
    "known_per_label": (table.label >= 0).sum(axis=0).tolist(),
  }


def ranks_of_labels(scores: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
  """AUROC and average precision of several labels, macro, micro and of each.

  Args:
    scores: float[n, num_labels].
    targets: int[n, num_labels]; 1, 0, or negative for not known.

  Returns:
    For each metric `NAME` (macro: the mean over labels that have both yes and no), `NAME_micro`
    (all decisions as those of one label) and `NAME_per_label`; None where it is not defined.
  """
  columns = [ranking_metrics(s, t) for s, t in zip(scores.T, targets.T, strict=True)]
  micro = ranking_metrics(scores.reshape(-1), targets.reshape(-1))
  result: dict[str, Any] = {}
  for name in RANKS:
    per_label = [column[name] for column in columns]
    defined = [value for value in per_label if value is not None]
    result[name] = float(np.mean(defined)) if defined else None
    result[f"{name}_micro"] = micro[name]
    result[f"{name}_per_label"] = per_label
  return result
