"""How wide a privacy loss distribution will be, from the parameters, before building it.

A few thousand points of quadrature give the range and spread of one event's privacy
loss and of its composition. From those follow the discretisation and the cost.
"""

import dataclasses
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation
from numpy.typing import NDArray
from scipy import special, stats

from dp_jax.errors import UserError

# dp-accounting cuts the noise where exp(-50) of its mass is left.
_Z_CUT = 9.77
_POINTS = 4001
# The mass that dp-accounting moves to infinity when it composes, and the number of
# orders of the Chernoff bound by which it finds the range that holds the rest.
_LOG_TAIL = math.log(2e15)
_CHERNOFF_ORDERS = np.arange(1, 21)


@dataclasses.dataclass(frozen=True)
class LossShape:
  """The extent of a privacy loss distribution, in units of the loss.

  Attributes:
    single: width of the range of one release's loss.
    composed: width of the range after composition.
    spread: standard deviation of one release's loss.
    build_weight: how many times a plain Gaussian's points have to be computed.
  """

  single: float
  composed: float
  spread: float
  build_weight: float


def loss_shape(
  event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation
) -> LossShape:
  """Predicts the extent of `count` compositions of `event`.

  Args:
    event: one release, of a kind that PLD composes.
    count: how often it is released.
    relation: dp-accounting's neighbouring relation.
  """
  if isinstance(event, dp_accounting.GaussianDpEvent):
    # Composes in closed form: `count` releases are one with less noise.
    mu = _factor(relation) * math.sqrt(count) / event.noise_multiplier
    return LossShape(2 * _Z_CUT * mu + mu * mu, 2 * _Z_CUT * mu + mu * mu, mu, 1.0)
  losses, weights, build_weight = _quadrature(event, relation)
  low, high = float(losses.min()), float(losses.max())
  mean = float(weights @ losses)
  spread = math.sqrt(max(0.0, float(weights @ (losses - mean) ** 2)))
  single = max(high - low, 1e-12)
  return LossShape(single, _composed(losses, weights, count, low, single), spread, build_weight)


def _factor(relation: NeighboringRelation) -> float:
  return 2.0 if relation == NeighboringRelation.REPLACE_ONE else 1.0


def _composed(
  losses: NDArray[np.float64], weights: NDArray[np.float64], count: int, low: float, single: float
) -> float:
  if count == 1:
    return single
  upper, lower = single * count, 0.0
  for order in _CHERNOFF_ORDERS / single:
    up = special.logsumexp((losses - low) * order, b=weights)
    down = special.logsumexp((losses - low) * -order, b=weights)
    upper = min(upper, (count * up + _LOG_TAIL) / order)
    lower = max(lower, -(count * down + _LOG_TAIL) / order)
  return float(max(single, upper - lower))


def _mixture(
  noise_multiplier: float, shifts: Any, probabilities: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
  """Losses of sum_i p_i N(c_i, s^2) against N(0, s^2), and the mixture's weights."""
  top = float(np.max(shifts))
  x = np.linspace(-_Z_CUT * noise_multiplier, top + _Z_CUT * noise_multiplier, _POINTS)
  shifts = np.asarray(shifts, dtype=np.float64)[:, None]
  probabilities = np.asarray(probabilities, dtype=np.float64)[:, None]
  exponents = (shifts * x - shifts**2 / 2) / noise_multiplier**2
  losses = special.logsumexp(exponents, b=probabilities, axis=0)
  log_density = losses - x * x / (2 * noise_multiplier**2)
  weights = np.exp(log_density - log_density.max())
  return losses, weights / weights.sum()


def _quadrature(
  event: dp_accounting.DpEvent, relation: NeighboringRelation
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
  if isinstance(event, dp_accounting.PoissonSampledDpEvent):
    rate, noise_multiplier = event.sampling_probability, event.event.noise_multiplier
    losses, weights = _mixture(noise_multiplier, [0.0, 1.0], [1 - rate, rate])
    if relation == NeighboringRelation.REPLACE_ONE:
      # Numerator and denominator are both mixtures, shifted in opposite directions.
      mirrored = np.concatenate([losses, -losses])
      return mirrored, np.concatenate([weights, weights]) / 2, 1.0
    return losses, weights, 1.0
  if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
    losses, weights = _mixture(event.standard_deviation, event.sensitivities, event.sampling_probs)
    return losses, weights, 30.0
  if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
    share, rate = truncation(event)
    plain, plain_weights = _mixture(event.noise_multiplier, [0.0, 1.0], [1 - rate, rate])
    if share == 0:
      return plain, plain_weights, 1.0
    cut, cut_weights = _mixture(event.noise_multiplier, [0.0, 2.0], [1 - rate, rate])
    losses = np.concatenate([plain, cut, -cut])
    half = share * cut_weights / 2
    return losses, np.concatenate([(1 - share) * plain_weights, half, half]), 2.0
  raise UserError(f"PLD has no loss distribution for {event}")


def truncation(event: dp_event.TruncatedSubsampledGaussianDpEvent) -> tuple[float, float]:
  """Returns the probability that a step that drew a given unit cuts its batch, and the rate."""
  share = stats.binom.sf(
    event.truncated_batch_size - 1, event.dataset_size - 1, event.sampling_probability
  )
  return float(share), float(event.sampling_probability)
