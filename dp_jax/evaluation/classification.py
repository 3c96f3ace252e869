"""Metrics of a classifier on a split, as exact sums over its real records."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dp_jax.data.pipeline import in_order
from dp_jax.evaluation.multilabel import HeldOutLabels
from dp_jax.evaluation.predictions import PredictionTable, TableBuilder, cross_entropy

CALIBRATION_BINS = 15
TOP_K = 5
# Of fewer classes than this, five of them are most of what there is to guess.
TOP_K_CLASSES = 20
# Real numbers are summed as whole multiples of this, so that the order of records is no matter.
GRID = 2.0**-32

# (inputs [n, *input_shape]) -> float32[n, num_classes], probabilities; or with further columns, the
# scores that rank records: of two classes one, of several labels one each
Predict = Callable[[np.ndarray], Any]


@dataclasses.dataclass
class ClassificationSums:
  """Sums over the records seen so far; adding batches in any order gives the same sums.

  Attributes:
    confusion: int64[num_classes, num_classes], rows are the true classes.
    top_k_correct: records whose class is among the TOP_K most probable.
    loss_units: the summed cross-entropy, in nats, in multiples of 2^-32.
    bin_counts, bin_correct: int64[CALIBRATION_BINS], by confidence of the prediction.
    bin_confidence_units: int64[CALIBRATION_BINS], summed confidences in multiples of 2^-32.
  """

  confusion: np.ndarray
  top_k_correct: int
  loss_units: int
  bin_counts: np.ndarray
  bin_confidence_units: np.ndarray
  bin_correct: np.ndarray

  @classmethod
  def zeros(cls, num_classes: int) -> "ClassificationSums":
    """Sums over no record."""
    confusion = np.zeros((num_classes, num_classes), np.int64)
    return cls(confusion, 0, 0, *(np.zeros(CALIBRATION_BINS, np.int64) for _ in range(3)))

  def add(self, probabilities: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> None:
    """Adds records.

    Args:
      probabilities: float[n, num_classes].
      labels: int[n].
      mask: bool[n]; False leaves a record out, whatever it holds.
    """
    probabilities = np.asarray(probabilities, np.float64)[mask]
    labels = np.asarray(labels)[mask]
    if not labels.size:
      return
    # A record with a prediction that is not a number counts as wrong, with no confidence.
    failed = ~np.isfinite(probabilities).all(axis=1)
    probabilities[failed] = 0.0
    predicted = probabilities.argmax(axis=1)
    predicted[failed] = (labels[failed] + 1) % len(self.confusion)
    np.add.at(self.confusion, (labels, predicted), 1)
    chosen = probabilities[np.arange(labels.size), labels]
    self.top_k_correct += int((in_top_k(probabilities, labels) & ~failed).sum())
    self.loss_units += int(in_units(cross_entropy(chosen)).sum())
    confidence = probabilities.max(axis=1)
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    np.add.at(self.bin_counts, bins, 1)
    np.add.at(self.bin_confidence_units, bins, in_units(confidence))
    np.add.at(self.bin_correct, bins, predicted == labels)

  def scalars(self) -> dict[str, float | None]:
    """Fractions but for the loss, the mean cross-entropy in nats.

    `accuracy`, `loss`, `calibration_error` (ECE), and with TOP_K_CLASSES or more
    `top_5_accuracy`. They are None where no record was added: an error would tell something of
    private records.
    """
    count = int(self.confusion.sum())
    gaps = np.abs(self.bin_correct - GRID * self.bin_confidence_units)
    sums = {
      "accuracy": np.trace(self.confusion),
      "loss": GRID * self.loss_units,
      "calibration_error": gaps.sum(),
    }
    if len(self.confusion) >= TOP_K_CLASSES:
      sums[f"top_{TOP_K}_accuracy"] = self.top_k_correct
    return {name: float(total / count) if count else None for name, total in sums.items()}

  def details(self) -> dict[str, Any]:
    """The scalars, and what tables and plots need: JSON values, None where a class is absent.

    A class that is neither among the labels nor among the predictions has no F1; `macro_f1` is the
    mean over the others.
    """
    totals = self.confusion.sum(axis=1)
    used = self.bin_counts > 0
    counts = self.bin_counts[used]
    f1 = self._f1()
    return {
      **self.scalars(),
      "num_records": int(totals.sum()),
      "confusion": self.confusion.tolist(),
      "per_class_accuracy": [
        float(hits / total) if total else None
        for hits, total in zip(np.diag(self.confusion), totals, strict=True)
      ],
      "per_class_f1": [None if np.isnan(value) else float(value) for value in f1],
      "macro_f1": None if np.isnan(f1).all() else float(np.nanmean(f1)),
      "calibration": {
        "confidence": (GRID * self.bin_confidence_units[used] / counts).tolist(),
        "accuracy": (self.bin_correct[used] / counts).tolist(),
        "count": counts.tolist(),
      },
    }

  def _f1(self) -> np.ndarray:
    """float[num_classes]: 2 TP / (2 TP + FP + FN), NaN where that is 0 / 0."""
    both = self.confusion.sum(axis=0) + self.confusion.sum(axis=1)
    with np.errstate(invalid="ignore"):
      return 2 * np.diag(self.confusion) / both


def in_top_k(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
  """bool[n]: whether fewer than TOP_K classes come before the label; of equals, the last first.

  That is the order of scikit-learn's `top_k_accuracy_score`.
  """
  chosen = probabilities[np.arange(labels.size), labels][:, None]
  later = np.arange(probabilities.shape[1]) > labels[:, None]
  before = (probabilities > chosen) | ((probabilities == chosen) & later)
  return before.sum(axis=1) < TOP_K


def in_units(values: np.ndarray) -> np.ndarray:
  """Values rounded to multiples of GRID, as int64; sums are exact up to 2^31 in all."""
  return np.rint(values / GRID).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """What is known of a classifier on a split.

  Attributes:
    sums: over its records.
    table: of its records.
  """

  sums: ClassificationSums
  table: PredictionTable

  def scalars(self) -> dict[str, float | None]:
    """Those of the sums, and of two classes AUROC and average precision."""
    return {**self.sums.scalars(), **self.table.rankings()}

  def details(self) -> dict[str, Any]:
    """The scalars, and what tables and plots need."""
    return {**self.scalars(), **self.sums.details()}


def evaluate(
  predict: Predict, loader: Any, num_classes: int, microbatch_size: int
) -> HeldOut | HeldOutLabels:
  """Evaluates a model on every record of a loader, each exactly once.

  Args:
    predict: probabilities of a batch of raw inputs, and scores where there are any (else records
      are ranked by probabilities, which saturate); always called with `microbatch_size` of them.
    loader: a `dp_jax.data.units.UnitLoader` of the split.
    num_classes: number of classes, or of labels where each is a question of its own.
    microbatch_size: units per call; the last call is padded and masked.
  """
  several = loader.spec.multilabel
  sums, builder = ClassificationSums.zeros(num_classes), TableBuilder(num_classes, several)
  for indices, outputs, units, mask in predictions(predict, loader, microbatch_size):
    probabilities, scores = np.split(outputs, [num_classes], axis=1)
    real = (units["record_mask"] & mask[:, None]).reshape(-1)
    labels = units["label"].reshape(len(real), *units["label"].shape[2:])
    if not several:
      sums.add(probabilities, labels, real)
    members = np.full(units["record_mask"].shape, -1)
    members[: len(indices)] = loader.members[indices]
    builder.add(members.reshape(-1), probabilities, labels, real, scores)
  table = builder.table()
  return HeldOutLabels(table) if several else HeldOut(sums, table)


def predictions(predict: Predict, loader: Any, microbatch_size: int) -> Any:
  """Yields (indices int64[n], what `predict` gives [size * K, ...], units, mask bool[size])."""
  for indices, units, mask in in_order(loader, microbatch_size):
    inputs = units["inputs"]
    yield indices, np.asarray(predict(inputs.reshape(-1, *inputs.shape[2:]))), units, mask
