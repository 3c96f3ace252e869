"""The difference in accuracy of two models on the same people."""

import numpy as np

from dp_jax.errors import UserError
from dp_jax.evaluation.bootstrap import Interval
from dp_jax.evaluation.intervals import Z, wilson
from dp_jax.evaluation.predictions import PredictionTable, check_same_records


def accuracy_difference(first: PredictionTable, second: PredictionTable) -> Interval:
  """Accuracy of the second less that of the first, with its 95% interval.

  The standard error is that of a ratio of sums over units, each with all of its records: what is
  hard for both models cancels, and records of one person count together.

  Args:
    first: predictions of a model.
    second: those of another one, record by record on the same records.

  Raises:
    ValueError: if they cannot be paired, or fewer than two units have a known label.

  Cochran 1977, Sampling Techniques, section 2.11 (ratio estimates of clusters).
  """
  check_same_records([first, second])
  known = first.label >= 0
  right = [(table.predicted == table.label) & known for table in (first, second)]
  gained = (right[1].astype(float) - right[0]).reshape(len(known), -1).sum(axis=1)
  counted = known.reshape(len(known), -1).sum(axis=1)
  _, units = np.unique(first.unit, return_inverse=True)
  differences, sizes = np.bincount(units, gained), np.bincount(units, counted)
  num_units, total = len(sizes), sizes.sum()
  if num_units < 2 or not total:
    raise UserError(f"{num_units} units give no interval.")
  mean = differences.sum() / total
  spread = np.square(differences - mean * sizes).sum() * num_units / (num_units - 1)
  half = Z * float(np.sqrt(spread)) / total
  if not spread:  # no unit was told apart: of n, up to this share may be (score interval)
    half = wilson(0.0, num_units).high
  return Interval(float(mean), float(mean - half), float(mean + half))
