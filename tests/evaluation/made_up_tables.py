"""Tables of made-up predictions, for tests of groups and their comparison."""

import numpy as np

from dp_jax.evaluation.predictions import PredictionTable


def binary_table(units, label, score, groups, **about):
  """Two classes; `score` is the probability of class 1."""
  score = np.asarray(score, np.float32)
  label = np.asarray(label, np.int32)
  return PredictionTable.of_labels(
    record=np.arange(len(label)), unit=np.asarray(units), label=label,
    predicted=(score > 0.5).astype(np.int32),
    label_probability=np.where(label == 1, score, 1 - score).astype(np.float32),
    score=score, groups={name: np.asarray(v) for name, v in groups.items()}, about=about,
  )  # fmt: skip


def right_or_wrong(units, right, groups, **about):
  """Three classes, all of class 0; `right` says whether each record is predicted so."""
  right = np.asarray(right, bool)
  return PredictionTable.of_labels(
    record=np.arange(len(right)), unit=np.asarray(units), label=np.zeros(len(right), np.int32),
    predicted=np.where(right, 0, 1).astype(np.int32),
    label_probability=np.where(right, 0.9, 0.1).astype(np.float32), score=np.zeros(0, np.float32),
    groups={name: np.asarray(v) for name, v in groups.items()}, about=about,
  )  # fmt: skip
