"""Metrics of one class a record, as functions of a table of predictions."""

from typing import Any

import numpy as np

from dp_jax.evaluation.predictions import PredictionTable

CALIBRATION_BINS = 15
TOP_K = 5
# Of fewer classes than this, five of them are most of what there is to guess.
TOP_K_CLASSES = 20
# Real numbers are summed as whole multiples of this, so that the order of records is no matter.
GRID = 2.0**-32


def class_rows(
  probabilities: np.ndarray, labels: np.ndarray, scores: np.ndarray | None = None
) -> dict[str, np.ndarray]:
  """The columns of a table of one class a record.

  A record with a prediction that is not a number counts as wrong, with no confidence.

  Args:
    probabilities: float[n, num_classes].
    labels: int[n].
    scores: float[n, s]; of two classes the logit of the second over the first (s = 1). None, or no
      column, ranks by probabilities, which saturate.

  Returns:
    As `PredictionTable` says of "label" to "score"; "confidence" float32[n], the probability of
    what is predicted, and "in_top_k" bool[n], whether fewer than TOP_K classes come before the
    label.
  """
  num_classes = probabilities.shape[1]
  probabilities = np.array(probabilities, np.float32)
  failed = ~np.isfinite(probabilities).all(axis=1)
  probabilities[failed] = 0.0
  predicted = probabilities.argmax(axis=1)
  predicted[failed] = (labels[failed] + 1) % num_classes
  score = np.zeros(0, np.float32)
  if num_classes == 2:
    ranked = scores is not None and scores.shape[1]
    score = np.array(scores[:, 0] if ranked else probabilities[:, 1], np.float32)  # type: ignore
    score[failed] = np.nan
  return {
    "label": labels.astype(np.int32),
    "predicted": predicted.astype(np.int32),
    "label_probability": probabilities[np.arange(len(labels)), labels],
    "score": score,
    "confidence": probabilities.max(axis=1, initial=0.0),
    "in_top_k": _in_top_k(probabilities, labels) & ~failed,
  }


def _in_top_k(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
  """bool[n]: whether fewer than TOP_K classes come before the label; of equals, the last first.

  That is the order of scikit-learn's `top_k_accuracy_score`.
  """
  chosen = probabilities[np.arange(labels.size), labels][:, None]
  later = np.arange(probabilities.shape[1]) > labels[:, None]
  before = (probabilities > chosen) | ((probabilities == chosen) & later)
  return np.asarray(before.sum(axis=1) < TOP_K)


def class_metrics(num_classes: int) -> tuple[str, ...]:
  """The names of `class_scalars` that every table has."""
  top = (f"top_{TOP_K}_accuracy",) if num_classes >= TOP_K_CLASSES else ()
  return ("accuracy", "loss", "calibration_error", *top)


def class_scalars(table: PredictionTable, num_classes: int) -> dict[str, float | None]:
  """Fractions but for the loss, the mean cross-entropy in nats.

  `accuracy`, `loss`, `calibration_error` (ECE), and with TOP_K_CLASSES or more `top_5_accuracy`; of
  two classes AUROC and average precision. They are None where there is no record: an error would
  tell something of private records.
  """
  count = len(table.label)
  _, hits, confidences = _bins(table)
  sums = {
    "accuracy": (table.predicted == table.label).sum(),
    "loss": GRID * in_units(table.losses()).sum(),
    "calibration_error": np.abs(hits - GRID * confidences).sum(),
  }
  if num_classes >= TOP_K_CLASSES:
    sums[f"top_{TOP_K}_accuracy"] = table.columns["in_top_k"].sum()
  means = {name: float(total / count) if count else None for name, total in sums.items()}
  return {**means, **table.rankings()}


def class_details(table: PredictionTable, num_classes: int) -> dict[str, Any]:
  """The scalars, and what tables and plots need: JSON values, None where a class is absent.

  A class that is neither among the labels nor among the predictions has no F1; `macro_f1` is the
  mean over the others.
  """
  confusion = np.zeros((num_classes, num_classes), np.int64)  # rows are the true classes
  np.add.at(confusion, (table.label, table.predicted), 1)
  totals, f1 = confusion.sum(axis=1), _f1(confusion)
  counts, hits, confidences = _bins(table)
  used = counts > 0
  return {
    **class_scalars(table, num_classes),
    "num_records": int(totals.sum()),
    "confusion": confusion.tolist(),
    "per_class_accuracy": [
      float(right / total) if total else None
      for right, total in zip(np.diag(confusion), totals, strict=True)
    ],
    "per_class_f1": [None if np.isnan(value) else float(value) for value in f1],
    "macro_f1": None if np.isnan(f1).all() else float(np.nanmean(f1)),
    "calibration": {
      "confidence": (GRID * confidences[used] / counts[used]).tolist(),
      "accuracy": (hits[used] / counts[used]).tolist(),
      "count": counts[used].tolist(),
    },
  }


def _bins(table: PredictionTable) -> tuple[np.ndarray, ...]:
  """int64[CALIBRATION_BINS] each, by confidence: records, right ones, confidences in GRID."""
  confidence = table.columns["confidence"].astype(np.float64)
  bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
  weights = (np.ones(len(bins), np.int64), table.predicted == table.label, in_units(confidence))
  sums = tuple(np.zeros(CALIBRATION_BINS, np.int64) for _ in weights)
  for total, each in zip(sums, weights, strict=True):
    np.add.at(total, bins, each)
  return sums


def _f1(confusion: np.ndarray) -> np.ndarray:
  """float[num_classes]: 2 TP / (2 TP + FP + FN), NaN where that is 0 / 0."""
  both = confusion.sum(axis=0) + confusion.sum(axis=1)
  with np.errstate(invalid="ignore"):
    return np.asarray(2 * np.diag(confusion) / both)


def in_units(values: np.ndarray) -> np.ndarray:
  """Values rounded to multiples of GRID, as int64; sums are exact up to 2^31 in all."""
  return np.rint(values / GRID).astype(np.int64)
