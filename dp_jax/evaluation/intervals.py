"""Intervals of shares, by formula."""

import math

from dp_jax.evaluation.bootstrap import Interval

# Of the normal distribution, both tails together 5%.
Z = 1.959964


def wilson(fraction: float, count: int) -> Interval:
  """The 95% score interval of a fraction of `count` independent records (Wilson 1927)."""
  centre = (fraction + Z * Z / (2 * count)) / (1 + Z * Z / count)
  half = Z / (1 + Z * Z / count)
  half *= math.sqrt(fraction * (1 - fraction) / count + Z * Z / (4 * count * count))
  return Interval(fraction, max(0.0, centre - half), min(1.0, centre + half))
