"""What the finite range of the Gaussian sampler costs in delta.

A sampler that works on finitely many bits cannot return a value beyond some
`GAUSSIAN_Z_MAX`. An outcome that one data set can produce and its neighbour cannot
has an infinite privacy loss, so its probability has to come out of delta.
"""

import math

from scipy import special

from dp_jax.errors import UserError
from dp_jax.files import checks

# Random bits of the uniform behind the noise sampler's Box-Muller radius.
RADIUS_BITS = 76
# The largest |z| that it is sure to reach: sqrt(2 * 76 * ln 2) = 10.2645, rounded down.
GAUSSIAN_Z_MAX = 10.26

# How much of delta the sampler may use up before the mechanism is refused.
MAX_SHARE_OF_DELTA = 0.01


class SamplerTailError(UserError):
  """The noise is so small that the sampler's range would show at this delta."""


def tail_delta(
  noise_multiplier: float,
  steps: int,
  sensitivity_factor: float = 1.0,
  sampling_rate: float = 1.0,
) -> float:
  """Returns the probability of an outcome that the neighbouring data cannot give.

  A unit moves the noised sum by at most `sensitivity_factor / noise_multiplier`
  standard deviations, and only in the steps that use it. So one step contributes
  at most `sampling_rate * Q(z_max - sensitivity_factor / noise_multiplier)`, and
  the steps add up (a union bound).

  A unit that is spread evenly over d coordinates adds at most sampling_rate * s *
  sqrt(d) * phi(z_max) a step to that, where s is its shift in standard deviations:
  below 2e-19 at s = 1 for a billion parameters, and left out.

  Args:
    noise_multiplier: stddev / clip_norm, at least 0.
    steps: releases; for a stream, passes over the data.
    sensitivity_factor: how many clip norms neighbours differ by: 2 under
      replace_one, else 1.
    sampling_rate: the largest probability that a step uses the unit, in (0, 1].

  Returns:
    A probability; 1.0 for no noise at all.
  """
  checks.non_negative("noise_multiplier", noise_multiplier)
  if noise_multiplier == 0:
    return 1.0
  z = GAUSSIAN_Z_MAX - sensitivity_factor / noise_multiplier
  return min(1.0, steps * sampling_rate * float(special.ndtr(-z)))


def usable_delta(delta: float, residual: float, noise_multiplier: float) -> float:
  """Returns what the accountant may spend of `delta` after the sampler's residual.

  Args:
    delta: the delta that is promised.
    residual: what `tail_delta` returned.
    noise_multiplier: for the message.

  Raises:
    SamplerTailError: if the residual exceeds a hundredth of delta.
  """
  if residual > MAX_SHARE_OF_DELTA * delta:
    raise SamplerTailError(
      f"noise_multiplier {noise_multiplier:.6g} is too small for delta {delta:.3g}: the Gaussian"
      f" sampler ends at {GAUSSIAN_Z_MAX} standard deviations, and outcomes beyond a neighbour's"
      f" range have a probability of up to {residual:.3g}, more than delta/100; use more noise"
      " (a smaller epsilon), fewer steps or a larger delta"
    )
  # Round down, so that the subtraction itself cannot give delta back.
  return math.nextafter(delta - residual, 0.0)
