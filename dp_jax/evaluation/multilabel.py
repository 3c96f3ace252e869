"""Metrics of several yes-or-no labels on a split; a label that is not known counts nowhere."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.scores import multilabel_metrics


@dataclass(frozen=True)
class HeldOutLabels:
  """What is known of a model of several labels on a split.

  Attributes:
    table: its predictions.
  """

  table: PredictionTable

  def scalars(self) -> dict[str, float | None]:
    """`accuracy` and `loss` over known labels; AUROC and average precision, means over labels."""
    table = self.table
    known = table.label >= 0
    count = int(known.sum())
    right = int(((table.predicted == table.label) & known).sum())
    losses = np.where(known, table.losses(), 0.0)
    ranks = self._ranks()
    return {
      "accuracy": right / count if count else None,
      "loss": float(losses.sum() / count) if count else None,
      "auroc": ranks["auroc"],
      "average_precision": ranks["average_precision"],
    }

  def details(self) -> dict[str, Any]:
    """The scalars, and AUROC and average precision of each label and of all together (micro)."""
    known = (self.table.label >= 0).sum(axis=0)
    return {
      **self._ranks(),
      **self.scalars(),
      "num_records": len(self.table.label),
      "known_per_label": known.tolist(),
    }

  def _ranks(self) -> dict[str, Any]:
    return multilabel_metrics(self.table.score, self.table.label)
