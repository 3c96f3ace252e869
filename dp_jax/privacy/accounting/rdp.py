"""Renyi accounting: fast, composes nearly everything, a little loose.

Wraps dp-accounting's RdpAccountant. Its default orders are kept; orders at which its
series does not converge are filled from whole orders, and its floating-point error is
added rather than hoped away.
"""

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dp_accounting
import numpy as np
from dp_accounting import dp_event, rdp
from dp_accounting.privacy_accountant import NeighboringRelation
from numpy.typing import NDArray

Parts = Sequence[tuple[dp_accounting.DpEvent, int]]

ORDERS: NDArray[np.float64] = np.array(
  [1 + x / 10.0 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
)
# The series of a fractional order ends after 1000 terms, and its terms rise up to
# about z0 = noise_multiplier^2 log(1/rate - 1); beyond this it is not tried.
_MAX_SERIES_CENTRE = 900.0
# Bounds on the rounding of log A(order): absolute per unit of order, and relative.
_ABSOLUTE_ERROR = 1e-15
_RELATIVE_ERROR = 1e-11
# The same for the best of several runs, relative and absolute.
_SELECTION_ERROR = 1e-9


def epsilon(parts: Parts, relation: NeighboringRelation, delta: float) -> tuple[float, float]:
  """Returns the epsilon of composed events, and the order that gave it.

  Args:
    parts: (event, count) pairs, released together.
    relation: dp-accounting's neighbouring relation.
    delta: in (0, 1).

  Returns:
    An upper bound, at least 0, infinite if no order has a finite bound.

  Mironov 2017, arXiv:1702.07476; conversion: Canonne, Kamath, Steinke 2020,
  arXiv:2004.00010, proposition 12.
  """
  total = np.zeros_like(ORDERS)
  for event, count in parts:
    total = total + count * renyi_divergences(event, relation)
  return convert(total, delta)


def convert(divergences: NDArray[np.float64], delta: float) -> tuple[float, float]:
  """Returns the smallest epsilon that Renyi divergences give at `delta`, and its order.

  Args:
    divergences: float64[len(ORDERS)], upper bounds at ORDERS.
    delta: in (0, 1).
  """
  best, best_order = math.inf, float(ORDERS[0])
  for order, divergence in zip(ORDERS, divergences, strict=True):
    if not math.isfinite(divergence):
      continue
    # delta <= sqrt(1 - exp(-KL)), and the KL divergence is below any Renyi divergence.
    if -math.expm1(-divergence) <= delta * delta:
      return 0.0, float(order)
    bound = divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
    if bound < best:
      best, best_order = bound, float(order)
  return max(0.0, best), best_order


@functools.lru_cache(maxsize=256)
def renyi_divergences(
  event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> NDArray[np.float64]:
  """Returns upper bounds on one event's Renyi divergences, float64[len(ORDERS)], at ORDERS."""
  if isinstance(event, dp_event.RepeatAndSelectDpEvent):
    # The error of the curve it starts from is multiplied by little more than one.
    values = _run(ORDERS, event, relation)
    return _frozen(values * (1 + _SELECTION_ERROR) + _SELECTION_ERROR)
  whole = np.array([float(order).is_integer() for order in ORDERS])
  skip = _series_centre(event) > _MAX_SERIES_CENTRE
  values = np.full_like(ORDERS, np.inf)
  tried = whole if skip else np.ones_like(whole)
  values[tried] = _run(ORDERS[tried], event, relation)
  values = _bound_fractional(values)
  error = _ABSOLUTE_ERROR * (1 + ORDERS) / (ORDERS - 1)
  return _frozen(values + error + _RELATIVE_ERROR * np.abs(values))


def _frozen(values: NDArray[np.float64]) -> NDArray[np.float64]:
  values.setflags(write=False)
  return values


def _bound_fractional(values: NDArray[np.float64]) -> NDArray[np.float64]:
  """Bounds the fractional orders, all below 11, by their whole neighbours too.

  (order - 1) * divergence is convex in the order and 0 at order 1, so its chord
  bounds it from above (Wang, Balle, Kasiviswanathan 2019, arXiv:1808.00087, corollary 10).
  Where dp-accounting's series does not converge, this is what is left; below order 2
  the series adds absolute values, and the chord is often the smaller bound.
  """
  scaled = {1: 0.0}
  for order, value in zip(ORDERS, values, strict=True):
    if float(order).is_integer():
      scaled[int(order)] = (order - 1) * value
  filled = values.copy()
  for i, order in enumerate(ORDERS):
    below = math.floor(order)
    if below != order:
      share = order - below
      chord = (1 - share) * scaled[below] + share * scaled[below + 1]
      filled[i] = np.fmin(values[i], chord / (order - 1))
  return filled


def _series_centre(event: dp_accounting.DpEvent) -> float:
  if isinstance(event, dp_accounting.PoissonSampledDpEvent):
    rate = event.sampling_probability
    if 0 < rate < 1 and isinstance(event.event, dp_accounting.GaussianDpEvent):
      return event.event.noise_multiplier**2 * abs(math.log(1 / rate - 1))
  return 0.0


def _run(
  orders: NDArray[np.float64], event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> NDArray[np.float64]:
  with _quiet(), np.errstate(all="ignore"):
    accountant = rdp.RdpAccountant(list(orders), relation)
    return np.asarray(accountant.compose(event).rdp, dtype=np.float64)


@contextmanager
def _quiet() -> Iterator[None]:
  """Keeps dp-accounting from logging each order that it drops; those are filled here."""
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)
