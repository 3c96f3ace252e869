"""What repeated runs say together: a mean over seeds, and how far it could be off."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from dp_jax.evaluation.bootstrap import LEVEL, Interval


def over_seeds(values: Sequence[float]) -> Interval:
  """The mean of one figure a seed, with Student's 95% interval; without bounds for one seed.

  It is of training again with other seeds on the same records: it says nothing of other records.

  Args:
    values: at least one; NaN gives NaN.
  """
  mean = float(np.mean(values))
  if len(values) < 2:
    return Interval(mean, float("nan"), float("nan"))
  error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
  half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
  return Interval(mean, mean - half, mean + half)
