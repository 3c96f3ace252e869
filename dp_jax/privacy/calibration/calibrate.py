"""From a target to a mechanism: how much noise, how many steps, or what rate."""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.accounting import accountants, tails
from dp_jax.privacy.calibration import search
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import Poisson, Scheme
from dp_jax.privacy.spec import PrivacySpec

_MAX_NOISE = 1e9
# Beyond what anyone trains, and what a loss distribution composes in a second.
_MAX_RELEASES = 10**7
# Of more steps than this, the last millionth is not looked for.
_WHOLE_STEPS = 10**6
_MIN_RATE = 2.0**-40
# How much coarser a loss distribution is while the answer is only being bracketed.
_ROUGH = 16


def calibrate(
  spec: PrivacySpec,
  sampling: Scheme,
  steps: int,
  clip_norm: float = 1.0,
  declared_batch_size: float | None = None,
) -> Mechanism:
  """Returns the mechanism with the least noise that meets the target.

  Its epsilon, computed again, is at most the target and within 1e-3 of it.

  Args:
    spec: epsilon, delta, adjacency and accountant.
    sampling: the scheme.
    steps: planned steps, at least 1.
    clip_norm: passed on; it does not change the noise multiplier.
    declared_batch_size: see Mechanism.

  Raises:
    ValueError: if the table has no such row, or no noise multiplier meets the target;
      the message says why, and names an epsilon that can be met.
  """
  start = Mechanism(
    sampling, 1.0, steps, clip_norm, spec.adjacency, spec.accountant, declared_batch_size
  )
  _refuse_without_need(spec.delta, start)
  least = _least_noise(start, spec.delta)

  def mechanism(at: float) -> Mechanism:
    return dataclasses.replace(start, noise_multiplier=math.exp(at))

  guess = math.log(max(_guess_noise(spec, start), least))
  limits = (math.log(least), math.log(_MAX_NOISE))
  try:
    found = mechanism(search.meet(*_distances(spec, mechanism), guess, limits))
  except search.SearchError as error:
    raise UserError(_unreachable_noise(spec, mechanism(error.nearest.at), error.jump)) from error
  found.account(spec.delta)  # Refuses a truncation that is over its cliff.
  return found


def calibrate_steps(
  spec: PrivacySpec,
  sampling: Scheme,
  noise_multiplier: float,
  clip_norm: float = 1.0,
  declared_batch_size: float | None = None,
) -> Mechanism:
  """Returns the mechanism with the most steps that meets the target.

  For a stream, whole passes over the data are counted, since a unit pays per pass. Past a
  million the answer is within a millionth of the most, and it is ten million at most.

  Args:
    spec: epsilon, delta, adjacency and accountant.
    sampling: the scheme.
    noise_multiplier: stddev / clip_norm, above 0.
    clip_norm: passed on.
    declared_batch_size: see Mechanism.

  Raises:
    ValueError: if even one step (or pass) spends more than the target; the message
      names what it spends.
  """
  noise_multiplier = checks.positive("noise_multiplier", noise_multiplier)
  per_release = sampling.steps_per_release

  def mechanism(at: float) -> Mechanism:
    steps = max(1, round(math.exp(-at))) * per_release
    return Mechanism(
      sampling,
      noise_multiplier,
      steps,
      clip_norm,
      spec.adjacency,
      spec.accountant,
      declared_batch_size,
    )

  def inside(low: float, high: float, at: float) -> float | None:
    most = _MAX_RELEASES if math.isinf(low) else round(math.exp(-low)) - 1
    least = 1 if math.isinf(high) else round(math.exp(-high)) + 1
    if most - least < least // _WHOLE_STEPS:
      return None
    return -math.log(min(max(round(math.exp(-at)), least), most)) if least <= most else None

  limits = (-math.log(_MAX_RELEASES), 0.0)
  try:
    found = mechanism(search.meet(*_distances(spec, mechanism), -math.log(100), limits, inside))
  except search.SearchError as error:
    nearest = mechanism(error.nearest.at)
    raise UserError(
      f"epsilon {spec.epsilon:g} cannot be met by choosing steps at noise_multiplier"
      f" {noise_multiplier:g}: {nearest.steps} steps spend {_epsilon(nearest, spec.delta):.6g};"
      " ask for that epsilon, or change the noise"
    ) from error
  found.account(spec.delta)
  return found


def calibrate_rate(
  spec: PrivacySpec,
  steps: int,
  noise_multiplier: float,
  clip_norm: float = 1.0,
  declared_batch_size: float | None = None,
) -> Mechanism:
  """Returns the Poisson mechanism with the largest sampling rate that meets the target.

  Args:
    spec: epsilon, delta, adjacency and accountant.
    steps: planned steps, at least 1.
    noise_multiplier: stddev / clip_norm, above 0.
    clip_norm: passed on.
    declared_batch_size: see Mechanism.

  Returns:
    The mechanism; its rate is 1 if even that meets the target.

  Raises:
    ValueError: if no rate meets the target.
  """
  noise_multiplier = checks.positive("noise_multiplier", noise_multiplier)

  def mechanism(at: float) -> Mechanism:
    rate = min(1.0, max(_MIN_RATE, math.exp(-at)))
    return Mechanism(
      Poisson(rate),
      noise_multiplier,
      steps,
      clip_norm,
      spec.adjacency,
      spec.accountant,
      declared_batch_size,
    )

  limits = (0.0, -math.log(_MIN_RATE))
  try:
    found = mechanism(search.meet(*_distances(spec, mechanism), -math.log(0.01), limits))
  except search.SearchError as error:
    found = mechanism(error.nearest.at)
    if error.nearest.value > 0:
      raise UserError(
        f"epsilon {spec.epsilon:g} cannot be met at any rate: the smallest tried,"
        f" {found.sampling.sampling_rate:.3g}, spends {_epsilon(found, spec.delta):.6g}"
      ) from error
  found.account(spec.delta)
  return found


Distance = Callable[[float], float]


def _distances(
  spec: PrivacySpec, mechanism: Callable[[float], Mechanism]
) -> tuple[Distance, Distance]:
  """Returns a cheap and an exact log(epsilon / target) of a point of the search."""

  def distance(at: float, coarsen: int) -> float:
    epsilon = _epsilon(mechanism(at), spec.delta, coarsen)
    return math.log(epsilon / spec.epsilon) if epsilon > 0 else -math.inf

  return lambda at: distance(at, _ROUGH), lambda at: distance(at, 1)


def _epsilon(mechanism: Mechanism, delta: float, coarsen: int = 1) -> float:
  try:
    usable = tails.usable_delta(delta, mechanism.tail_delta(), mechanism.noise_multiplier)
  except tails.SamplerTailError:
    return math.inf
  row = mechanism.row
  return accountants.account_parts(
    mechanism.parts(), row.relation, row.accountants, mechanism.accountant, usable, coarsen
  ).epsilon


def _refuse_without_need(delta: float, mechanism: Mechanism) -> None:
  """Raises ValueError where delta covers that a unit is used at all, whatever the noise."""
  if mechanism.row.accountants[0] == "analytic_gaussian" or mechanism.sampling.sampling_rate == 1:
    return
  used = -math.expm1(mechanism.steps * math.log1p(-mechanism.sampling.sampling_rate))
  if used < delta:
    raise UserError(
      f"no noise is needed for this target: a unit is used at all with probability {used:.3g},"
      f" which is less than delta {delta:.3g}; choose a delta below one over the number of units"
    )


def _least_noise(mechanism: Mechanism, delta: float) -> float:
  """Returns the least noise multiplier whose sampler residual this delta can bear."""
  low, high = 1e-3, 1e3
  while high / low > 1 + 1e-9:
    middle = math.sqrt(low * high)
    residual = dataclasses.replace(mechanism, noise_multiplier=middle).tail_delta()
    if residual > tails.MAX_SHARE_OF_DELTA * delta:
      low = middle
    else:
      high = middle
  return high


def _guess_noise(spec: PrivacySpec, mechanism: Mechanism) -> float:
  """Returns about the right noise, by the central limit of Gaussian differential privacy.

  Bu, Dong, Long, Su 2020, arXiv:1911.11607, theorem 5.
  """
  mu = 1 / dp_accounting.get_sigma_gaussian(spec.epsilon, spec.delta)
  row = mechanism.row
  count = mechanism.sampling.releases(mechanism.steps)
  if row.accountants[0] == "analytic_gaussian":
    return row.sensitivity_factor * math.sqrt(count) / mu
  spent = mechanism.sampling.sampling_rate * math.sqrt(count)
  return row.sensitivity_factor / math.sqrt(math.log1p((mu / spent) ** 2))


def _unreachable_noise(spec: PrivacySpec, nearest: Mechanism, jump: bool) -> str:
  if jump:
    return (
      f"epsilon {spec.epsilon:g} at delta {spec.delta:g} cannot be met to a thousandth: at"
      f" noise_multiplier {nearest.noise_multiplier:.6g} the accountant's figure jumps over it from"
      f" {_epsilon(nearest, spec.delta):.6g}; ask for that, or for another accountant"
    )
  row = nearest.row
  usable = spec.delta * (1 - tails.MAX_SHARE_OF_DELTA)
  found = accountants.account_parts(
    nearest.parts(), row.relation, row.accountants, nearest.accountant, usable
  )
  if found.epsilon > spec.epsilon:
    return (
      f"epsilon {spec.epsilon:g} at delta {spec.delta:g} cannot be met: the smallest that can is"
      f" {found.epsilon:.6g} ({found.reason})"
    )
  return (
    f"epsilon {spec.epsilon:g} at delta {spec.delta:g} cannot be used up: noise_multiplier"
    f" {nearest.noise_multiplier:.6g} is the least whose tails the Gaussian sampler serves at this"
    f" delta, and it spends {found.epsilon:.6g}; ask for at most that, or for a larger delta"
  )
