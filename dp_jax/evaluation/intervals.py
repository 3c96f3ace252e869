"""Intervals of shares, by formula."""

import math

from scipy.special import ndtri

from dp_jax.evaluation.bootstrap import Interval

# Of the normal distribution, both tails together 5%.
Z = float(ndtri(0.975))


def difference(first: Interval, second: Interval) -> Interval:
  """The first less the second, from their own intervals; as if they were independent.

  For shares with score intervals it stays honest where both are 0 or 1 in the data, and a bootstrap
  sees no spread at all. Of positively related ones it is too wide.

  Newcombe 1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I, method 10;
  for any two intervals Zou, Donner 2008, doi:10.1002/sim.3095.
  """
  value = first.value - second.value
  below = math.hypot(first.value - first.low, second.high - second.value)
  above = math.hypot(first.high - first.value, second.value - second.low)
  return Interval(value, value - below, value + above)


def wider(one: Interval, other: Interval) -> Interval:
  """The value of the first, with the outer bounds of both; NaN where one has none."""
  low, high = min(one.low, other.low), max(one.high, other.high)
  if math.isnan(other.low) or math.isnan(other.high):
    low = high = float("nan")
  return Interval(one.value, low, high)


def wilson(fraction: float, count: int) -> Interval:
  """The 95% score interval of a fraction of `count` independent records (Wilson 1927)."""
  centre = (fraction + Z * Z / (2 * count)) / (1 + Z * Z / count)
  half = Z / (1 + Z * Z / count)
  half *= math.sqrt(fraction * (1 - fraction) / count + Z * Z / (4 * count * count))
  return Interval(fraction, max(0.0, centre - half), min(1.0, centre + half))
