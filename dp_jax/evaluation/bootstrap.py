"""Bootstrap over units: how much a figure would move with another sample of people.

Records of one person are not independent, so units are drawn, each with all of its records. A
resample is a weight per unit, the number of times that it was drawn, and every metric is a function
of weights; nothing is copied.

Efron, Tibshirani 1993, An Introduction to the Bootstrap, chapters 8 and 13 (percentile intervals).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

RESAMPLES = 2000
LEVEL = 0.95
# Resamples that are drawn and used together: their weights are in memory at once.
_CHUNK = 50
_THREADS = 2

# (weights int32[r, num_units]) -> values float64[r, ...]
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Interval:
  """An estimate with its 95% interval; NaN where it is not defined."""

  value: float
  low: float
  high: float

  @property
  def excludes_zero(self) -> bool:
    """Whether zero lies outside the interval."""
    return self.low > 0 or self.high < 0

  def to_list(self) -> list[float | None]:
    """[value, low, high], None for NaN."""
    return [None if np.isnan(x) else float(x) for x in (self.value, self.low, self.high)]


def resample(
  statistics: Sequence[Statistic], num_units: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[np.ndarray]:
  """Values of several statistics on the same resamples, so that they can be paired.

  Args:
    statistics: functions of the weights of units.
    num_units: how many units there are, at least 1.
    resamples: how many times to draw.
    seed: the same seed draws the same units.

  Returns:
    For each statistic float64[resamples, ...].
  """
  starts = range(0, resamples, _CHUNK)
  seeds = np.random.SeedSequence(seed).spawn(len(starts))

  def chunk(start: int, own: np.random.SeedSequence) -> list[np.ndarray]:
    count = min(_CHUNK, resamples - start)
    weights = draw_weights(np.random.Generator(np.random.SFC64(own)), num_units, count)
    return [statistic(weights) for statistic in statistics]

  # The threads are these: each matrix product keeps to its own.
  with threadpool_limits(1, "blas"), ThreadPoolExecutor(_THREADS) as pool:
    pieces = list(pool.map(chunk, starts, seeds))
  return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def draw_weights(rng: np.random.Generator, num_units: int, count: int) -> np.ndarray:
  """Multinomial counts of `num_units` draws with replacement: int32[count, num_units]."""
  weights = np.empty((count, num_units), np.int32)
  for row in weights:
    drawn = rng.integers(0, num_units, num_units, dtype=np.uint32)
    row[:] = np.bincount(drawn.astype(np.intp), minlength=num_units)
  return weights


def interval(value: np.ndarray, samples: np.ndarray) -> Iterator[Interval]:
  """Percentile intervals.

  Args:
    value: float[g], estimates on the data themselves.
    samples: float[resamples, g]; resamples on which a value is not defined are NaN and left out.

  Yields:
    An interval for each of the g; without bounds where half of the resamples have no value.
  """
  tail = (1 - LEVEL) / 2
  for estimate, column in zip(np.asarray(value, float), samples.T, strict=True):
    known = column[np.isfinite(column)]
    if not np.isfinite(estimate) or len(known) < len(column) / 2:
      yield Interval(float(estimate), float("nan"), float("nan"))
      continue
    low, high = np.quantile(known, [tail, 1 - tail])
    yield Interval(float(estimate), float(low), float(high))


def ratio_statistic(
  numerator: np.ndarray,
  denominator: np.ndarray,
  units: np.ndarray,
  num_units: int,
  codes: np.ndarray,
  groups: np.ndarray,
) -> Statistic:
  """A weighted mean in each group, such as accuracy: a ratio of two sums over records.

  The sums of disjoint cells are matrix products with the weights; groups are sums of cells.

  Args:
    numerator: float[n], of each record.
    denominator: float[n], of each record.
    units: int[n], the unit of each record.
    num_units: how many units there are.
    codes: int[n], the cell of each record.
    groups: float[num_groups, num_cells], 1 for the cells that a group is made of.

  Returns:
    weights -> float64[r, num_groups], NaN where the denominator is zero.
  """
  cells = groups.shape[1]
  tops, bottoms = (
    np.bincount(units * cells + codes, values, num_units * cells)
    .astype(np.float32)
    .reshape(num_units, cells)
    for values in (np.asarray(numerator, float), np.asarray(denominator, float))
  )

  def statistic(weights: np.ndarray) -> np.ndarray:
    drawn = weights.astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
      top, bottom = ((drawn @ m).astype(np.float64) @ groups.T for m in (tops, bottoms))
      return np.where(bottom > 0, top / bottom, np.nan)

  return statistic


def auroc_statistic(
  positive: np.ndarray, score: np.ndarray, units: np.ndarray, codes: np.ndarray, num_groups: int
) -> Statistic:
  """The area under the ROC curve in each group of a partition; equal scores count half.

  The weighted area is the weighted share of (positive, negative) pairs that are in order, so one
  sort serves all resamples and what remains is a cumulated sum over the negatives.

  Args:
    positive: bool[n].
    score: float[n].
    units: int[n], the unit of each record.
    codes: int[n], the group of each record, in 0..num_groups - 1; negative ones are left out.
    num_groups: how many groups there are.

  Returns:
    weights -> float64[r, num_groups], NaN where a group has no positives or no negatives.

  Hanley, McNeil 1982, doi:10.1148/radiology.143.1.7063747.
  """
  kept = codes >= 0
  # Scores as ranks, which compare exactly; a group's ranks do not reach into the next one's.
  ranks = np.unique(score[kept], return_inverse=True)[1]
  place = codes[kept].astype(np.int64) * (len(ranks) + 1) + ranks
  is_positive, unit = positive[kept], units[kept]
  (pos, pos_units), (neg, neg_units) = (
    (place[which][order], unit[which][order])
    for which in (is_positive, ~is_positive)
    for order in [np.argsort(place[which], kind="stable")]
  )
  edges = np.arange(num_groups + 1) * (len(ranks) + 1)
  neg_edges, pos_edges = np.searchsorted(neg, edges), np.searchsorted(pos, edges)
  below, upto = (np.searchsorted(neg, pos, side) for side in ("left", "right"))

  def one(weights: np.ndarray) -> np.ndarray:
    # Twice the negatives before each positive, in whole numbers: exact, and faster than floats.
    # Those of earlier groups, which lie before all of a group's own, are taken off at the end.
    negatives, own = _cumulated(weights[neg_units]), weights[pos_units].astype(np.int64)
    twice = _cumulated(own * (negatives[below] + negatives[upto]))
    starts, positives = negatives[neg_edges], np.diff(_cumulated(own)[pos_edges])
    ordered = np.diff(twice[pos_edges]) - 2 * positives * starts[:-1]
    pairs = np.diff(starts) * positives
    with np.errstate(invalid="ignore", divide="ignore"):
      return np.where(pairs > 0, ordered / (2 * pairs), np.nan)

  return lambda weights: np.stack([one(row) for row in weights])


def _cumulated(values: np.ndarray) -> np.ndarray:
  """Sums of the first 0, 1, ... values, int64[n + 1]."""
  result = np.zeros(len(values) + 1, np.int64)
  np.cumsum(values, out=result[1:], dtype=np.int64)
  return result
