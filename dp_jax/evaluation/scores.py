"""Metrics of ranks on gathered scores, as scikit-learn defines them: AUROC, average precision."""

from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

_METRICS = {"auroc": roc_auc_score, "average_precision": average_precision_score}


def ranking_metrics(scores: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
  """`auroc` and `average_precision` of one yes-or-no question.

  Args:
    scores: float[n], higher for a likelier yes. One that is not a number ranks as wrong as it can.
    targets: int[n], 1 for yes, 0 for no, negative for not known, which leaves the record out.

  Returns:
    Both are None where there are not both yes and no: a rank says nothing then.
  """
  known = targets >= 0
  targets = targets[known]
  if len(np.unique(targets)) < 2:
    return dict.fromkeys(_METRICS)
  ranked = finite_scores(scores[known], targets)
  return {name: float(metric(targets, ranked)) for name, metric in _METRICS.items()}


def multilabel_metrics(scores: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
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
  for name in _METRICS:
    per_label = [column[name] for column in columns]
    defined = [value for value in per_label if value is not None]
    result[name] = float(np.mean(defined)) if defined else None
    result[f"{name}_micro"] = micro[name]
    result[f"{name}_per_label"] = per_label
  return result


def finite_scores(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """The scores; one that is not finite becomes the lowest of a yes, the highest of a no."""
  largest = np.finfo(scores.dtype).max
  return np.where(np.isfinite(scores), scores, np.where(targets > 0, -largest, largest))
