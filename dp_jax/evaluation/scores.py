"""Metrics of ranks on gathered scores, as scikit-learn defines them: AUROC, average precision."""

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


def finite_scores(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """The scores; one that is not finite becomes the lowest of a yes, the highest of a no."""
  largest = np.finfo(scores.dtype).max
  return np.where(np.isfinite(scores), scores, np.where(targets > 0, -largest, largest))
