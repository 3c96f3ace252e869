"""Metrics of a classifier on a split, as exact sums over its real records."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

CALIBRATION_BINS = 15

# (inputs [n, *input_shape]) -> probabilities float32[n, num_classes]
Predict = Callable[[np.ndarray], Any]


@dataclasses.dataclass
class ClassificationSums:
  """Sums over the records seen so far; adding batches in any order gives the same sums.

  Attributes:
    confusion: int64[num_classes, num_classes], rows are the true classes.
    loss_sum: the summed cross-entropy, in nats.
    bin_counts, bin_confidences, bin_correct: [CALIBRATION_BINS], by confidence of the prediction.
  """

  confusion: np.ndarray
  loss_sum: float
  bin_counts: np.ndarray
  bin_confidences: np.ndarray
  bin_correct: np.ndarray

  @classmethod
  def zeros(cls, num_classes: int) -> "ClassificationSums":
    """Sums over no record."""
    bins = np.zeros(CALIBRATION_BINS)
    confusion = np.zeros((num_classes, num_classes), np.int64)
    return cls(confusion, 0.0, bins.astype(np.int64), bins.copy(), bins.astype(np.int64))

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
    self.loss_sum -= float(np.log(np.maximum(chosen, np.finfo(np.float32).tiny)).sum())
    confidence = probabilities.max(axis=1)
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    np.add.at(self.bin_counts, bins, 1)
    np.add.at(self.bin_confidences, bins, confidence)
    np.add.at(self.bin_correct, bins, predicted == labels)

  def scalars(self) -> dict[str, float | None]:
    """`accuracy` (a fraction), `loss` (mean cross-entropy, nats), `calibration_error` (ECE).

    They are None where no record was added: an error would tell something of private records.
    """
    count = int(self.confusion.sum())
    if count == 0:
      return {"accuracy": None, "loss": None, "calibration_error": None}
    gaps = np.abs(self.bin_correct - self.bin_confidences)
    return {
      "accuracy": float(np.trace(self.confusion) / count),
      "loss": self.loss_sum / count,
      "calibration_error": float(gaps.sum() / count),
    }

  def details(self) -> dict[str, Any]:
    """The scalars, and what tables and plots need: JSON values, None where a class is absent."""
    totals = self.confusion.sum(axis=1)
    used = self.bin_counts > 0
    counts = self.bin_counts[used]
    return {
      **self.scalars(),
      "num_records": int(totals.sum()),
      "confusion": self.confusion.tolist(),
      "per_class_accuracy": [
        float(hits / total) if total else None
        for hits, total in zip(np.diag(self.confusion), totals, strict=True)
      ],
      "calibration": {
        "confidence": (self.bin_confidences[used] / counts).tolist(),
        "accuracy": (self.bin_correct[used] / counts).tolist(),
        "count": counts.tolist(),
      },
    }


def evaluate(
  predict: Predict, loader: Any, num_classes: int, microbatch_size: int
) -> ClassificationSums:
  """Evaluates a classifier on every record of a loader, each exactly once.

  Args:
    predict: probabilities of a batch of raw inputs; always called with `microbatch_size` of them.
    loader: a `dp_jax.data.units.UnitLoader` of the split.
    num_classes: number of classes.
    microbatch_size: units per call; the last call is padded and masked.
  """
  sums = ClassificationSums.zeros(num_classes)
  for _, probabilities, units, mask in predictions(predict, loader, microbatch_size):
    real = (units["record_mask"] & mask[:, None]).reshape(-1)
    sums.add(probabilities, units["label"].reshape(-1), real)
  return sums


def predictions(predict: Predict, loader: Any, microbatch_size: int) -> Any:
  """Yields (indices int64[n], probabilities [size * K, num_classes], units, mask bool[size])."""
  for start in range(0, loader.num_units, microbatch_size):
    indices = np.arange(start, min(start + microbatch_size, loader.num_units))
    units, mask = loader.load(indices, microbatch_size)
    inputs = units["inputs"]
    yield indices, np.asarray(predict(inputs.reshape(-1, *inputs.shape[2:]))), units, mask
