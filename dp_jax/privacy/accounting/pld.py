"""Privacy loss distributions: the tight accountant, kept within bounds of time and memory.

Wraps dp-accounting's functions. The discretisation is chosen from the parameters
before anything is built; rounding is to the pessimistic side, so a coarse one gives a
larger epsilon and never a wrong one.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.privacy_accountant import NeighboringRelation
from numpy.typing import ArrayLike, NDArray

from dp_jax.errors import UserError
from dp_jax.privacy.accounting import losses

Parts = Sequence[tuple[dp_accounting.DpEvent, int]]

# dp-accounting's default, and the one that published figures use.
STANDARD_DISCRETIZATION = 1e-4
# Chosen so that one call stays under 10 s and 1 GB on one core of 2024.
_MAX_SINGLE_POINTS = 900_000
_MAX_COMPOSED_POINTS = 4_000_000
# Finer than the standard one only where that is cheap: it buys little.
_MAX_REFINED_SINGLE_POINTS = 250_000
_MAX_REFINED_COMPOSED_POINTS = 1_500_000
# A step's loss must be spread over this many points, or rounding adds up over steps.
_POINTS_PER_SPREAD = 50
_POINTS_PER_EPSILON = 100
# What a Fourier transform to the power `count` may be off by, in total probability.
_TRANSFORM_ERROR = 1e-12
_TRANSFORM_ERROR_PER_STEP = 2e-15
_MAX_ERROR_SHARE = 0.01
# Of more releases, the rounding of each adds up to more than the losses themselves.
_MAX_RELEASES = 10**8
# Covers the rounding of the conversion itself.
_ROUND_UP = 1e-9


# What dp-accounting raises where parameters are extreme.
FAILURES = (ValueError, ZeroDivisionError, OverflowError, FloatingPointError, MemoryError)


class PldError(Exception):
  """PLD has no useful answer within its limits; the message says why."""


@dataclasses.dataclass(frozen=True)
class PldEpsilon:
  """An epsilon by PLD, and the discretisation it was computed at."""

  epsilon: float
  discretization: float


def epsilon(
  parts: Parts, relation: NeighboringRelation, delta: float, coarsen: int = 1
) -> PldEpsilon:
  """Returns an upper bound on the epsilon of composed events.

  Args:
    parts: (event, count) pairs, released together.
    relation: dp-accounting's neighbouring relation, the same for all.
    delta: in (0, 1).
    coarsen: multiplies the discretisation, for searches that start roughly.

  Raises:
    PldError: if delta is too small to be resolved in floating point, or the
      construction fails.

  Doroshenko et al. 2022, arXiv:2207.04380 (discretisation by connecting the dots).
  """
  error = transform_error(parts)
  check_resolved(parts, delta)
  shapes = [losses.loss_shape(event, count, relation) for event, count in parts]
  step = coarsen * discretization(shapes, [count for _, count in parts])
  result = _epsilon_at(parts, relation, delta - error, step)
  if 0 < result < _POINTS_PER_EPSILON * step and coarsen == 1:
    finer = _power_of_two_below(result / _POINTS_PER_EPSILON)
    if finer < step and _fits(shapes, finer):
      step = finer
      result = min(result, _epsilon_at(parts, relation, delta - error, step))
  return PldEpsilon(result * (1 + _ROUND_UP), step)


def deltas(
  parts: Parts, relation: NeighboringRelation, epsilons: ArrayLike, step: float
) -> NDArray[np.float64]:
  """Returns upper bounds on delta at many epsilons, from one composition.

  Args:
    parts: (event, count) pairs, released together.
    relation: dp-accounting's neighbouring relation, the same for all.
    epsilons: at least 0, in increasing order.
    step: the discretisation, as `epsilon` returned it.

  Returns:
    float64[len(epsilons)], in [0, 1].
  """
  composed = _compose(tuple(parts), relation, step)
  slack = transform_error(parts) + max(0.0, 1.0 - _smallest_mass(composed))
  with np.errstate(all="ignore"):
    found = np.asarray(composed.get_delta_for_epsilon(np.asarray(epsilons, dtype=np.float64)))
  return np.clip(found + slack, 0.0, 1.0)


def transform_error(parts: Parts) -> float:
  """Returns what composing by Fourier transforms may be off by, in total probability."""
  return _TRANSFORM_ERROR + _TRANSFORM_ERROR_PER_STEP * sum(count for _, count in parts)


def check_resolved(parts: Parts, delta: float) -> None:
  """Raises PldError if so many releases cannot be composed precisely enough for `delta`."""
  if sum(count for event, count in parts if not _closed_form(event)) > _MAX_RELEASES:
    raise PldError(f"more than {_MAX_RELEASES:.0g} releases are beyond PLD")
  error = transform_error(parts)
  if error > _MAX_ERROR_SHARE * delta:
    raise PldError(f"delta {delta:.3g} is too close to the rounding error of PLD here, {error:.1g}")


def _closed_form(event: dp_accounting.DpEvent) -> bool:
  """Whether any number of these is one release with less noise."""
  return isinstance(event, dp_accounting.GaussianDpEvent)


def discretization(shapes: Sequence[losses.LossShape], counts: Sequence[int]) -> float:
  """Returns the standard discretisation times a power of two: as fine as needed and affordable."""
  step = STANDARD_DISCRETIZATION
  for shape, count in zip(shapes, counts, strict=True):
    if count > 1 and shape.spread > 0:
      step = min(step, _power_of_two_below(shape.spread / _POINTS_PER_SPREAD))
  while not _fits(shapes, step):
    step *= 2
  return step


def _power_of_two_below(value: float) -> float:
  return STANDARD_DISCRETIZATION * 2.0 ** math.floor(math.log2(value / STANDARD_DISCRETIZATION))


def _fits(shapes: Sequence[losses.LossShape], step: float) -> bool:
  single = sum(shape.single * shape.build_weight for shape in shapes) / step
  composed = sum(shape.composed for shape in shapes) / step
  if step < STANDARD_DISCRETIZATION:
    return single <= _MAX_REFINED_SINGLE_POINTS and composed <= _MAX_REFINED_COMPOSED_POINTS
  return single <= _MAX_SINGLE_POINTS and composed <= _MAX_COMPOSED_POINTS


def _epsilon_at(parts: Parts, relation: NeighboringRelation, delta: float, step: float) -> float:
  composed = _compose(tuple(parts), relation, step)
  # Mass that rounding lost counts as an unbounded loss.
  lost = max(0.0, 1.0 - _smallest_mass(composed))
  if lost >= delta:
    raise PldError(f"rounding lost {lost:.1g} of the probability, and delta is {delta:.3g}")
  with np.errstate(all="ignore"):
    try:
      return float(composed.get_epsilon_for_delta(delta - lost))
    except OverflowError as error:
      raise PldError(f"the privacy loss is too large to convert ({error})") from error


@functools.lru_cache(maxsize=1)  # one can take 200 MB; it is read at several deltas in a row
def _compose(parts: Parts, relation: NeighboringRelation, step: float) -> Any:
  composed = None
  with np.errstate(all="ignore"), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for event, count in parts:
      try:
        part = _distribution(event, count, relation, step)
        composed = part if composed is None else composed.compose(part)
      except FAILURES as error:
        raise PldError(f"dp-accounting cannot build this distribution ({error})") from error
  if composed is None:
    raise PldError("there is nothing to compose")
  return composed


def _distribution(
  event: dp_accounting.DpEvent, count: int, relation: NeighboringRelation, step: float
) -> Any:
  common = {"value_discretization_interval": step}
  if isinstance(event, dp_accounting.GaussianDpEvent):
    return distributions.from_gaussian_mechanism(
      event.noise_multiplier / math.sqrt(count), neighboring_relation=relation, **common
    )
  if isinstance(event, dp_accounting.PoissonSampledDpEvent):
    single = distributions.from_gaussian_mechanism(
      event.event.noise_multiplier,
      sampling_prob=event.sampling_probability,
      neighboring_relation=relation,
      **common,
    )
  elif isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
    single = distributions.from_truncated_subsampled_gaussian_mechanism(
      event.dataset_size,
      event.sampling_probability,
      event.truncated_batch_size,
      event.noise_multiplier,
      neighboring_relation=relation,
      **common,
    )
  elif isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
    single = distributions.from_mixture_gaussian_mechanism(
      event.standard_deviation, event.sensitivities, event.sampling_probs, **common
    )
  else:
    raise UserError(f"PLD cannot compose {event}")
  return self_compose(single, count)


def self_compose(single: Any, count: int) -> Any:
  """Returns `count` compositions of a dp-accounting distribution, which are made from arrays.

  dp-accounting stores one of up to a thousand points as a dictionary, and then computes
  size ** count to see whether it stays small: for many steps, a number of gigabytes.
  """
  if count == 1:
    return single
  add = None if single._symmetric else single._pmf_add.to_dense_pmf()
  dense = distributions.PrivacyLossDistribution(single._pmf_remove.to_dense_pmf(), add)
  return dense.self_compose(count)


def _smallest_mass(composed: Any) -> float:
  """Returns the total probability, infinite losses included, of the direction with less of it."""
  directions = (composed._pmf_remove, composed._pmf_add)
  return min(float(pmf.get_delta_for_epsilon(-1e300)) for pmf in directions)
