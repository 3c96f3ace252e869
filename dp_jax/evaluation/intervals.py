"""Intervals of shares, by formula."""

import math

from scipy.special import ndtri

from dp_jax.evaluation.bootstrap import Interval

# Of the normal distribution, both tails together 5%.
Z = float(ndtri(0.975))


def wilson(fraction: float, count: int) -> Interval:
  """The 95% score interval of a fraction of `count` independent records (Wilson 1927)."""
  centre = (fraction + Z * Z / (2 * count)) / (1 + Z * Z / count)
  half = Z / (1 + Z * Z / count)
  half *= math.sqrt(fraction * (1 - fraction) / count + Z * Z / (4 * count * count))
  return Interval(fraction, max(0.0, centre - half), min(1.0, centre + half))
