"""From composed events to an epsilon: which accountant, why, and at what precision."""

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from dp_jax.privacy.accounting import pld, rdp

Parts = tuple[tuple[dp_accounting.DpEvent, int], ...]

# A search for epsilon stops within 1e-12 of it; these cover that on the safe side.
_ROOT_ERROR = 4e-12
_ROOT_RELATIVE_ERROR = 1e-12
# Past the first, a double no longer resolves the curve, whose root came out too small (seen from
# 4e8); past the second, the square of mu, about twice the epsilon, does not fit one.
_MAX_RESOLVED_MU = 1e6
_MAX_MU = 1e150


@dataclasses.dataclass(frozen=True)
class Accounted:
  """An epsilon and where it comes from.

  Attributes:
    epsilon: an upper bound, at least 0; infinite where there is none.
    delta: the delta it holds at, the sampler's residual included.
    accountant: the one used: "pld", "rdp", "analytic_gaussian", or, where releases
      share none, a sum such as "pld+rdp".
    reason: why that one, and at what precision.
    library_version: of dp-accounting.
    tail_delta: how much of delta covers the finite range of the noise sampler.
    discretization: the interval of the loss distribution, None without PLD.
  """

  epsilon: float
  delta: float
  accountant: str
  reason: str
  library_version: str
  tail_delta: float = 0.0
  discretization: float | None = None

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON values (an infinite epsilon stays a float)."""
    return dataclasses.asdict(self)


@functools.cache
def library_version() -> str:
  """Returns the version of dp-accounting, as "dp-accounting X.Y.Z"."""
  return f"dp-accounting {importlib.metadata.version('dp-accounting')}"


@functools.lru_cache(maxsize=256)
def account_parts(
  parts: Parts,
  relation: NeighboringRelation,
  accountants: tuple[str, ...],
  requested: str,
  delta: float,
  coarsen: int = 1,
) -> Accounted:
  """Returns an epsilon of composed events.

  Args:
    parts: (event, count) pairs released together; counts at least 1.
    relation: dp-accounting's neighbouring relation for all of them.
    accountants: those that can compose them all, the preferred one first.
    requested: "auto" or one of `accountants`.
    delta: what may be spent, in (0, 1).
    coarsen: see `pld.epsilon`.

  Returns:
    An Accounted; its epsilon is infinite if no accountant has a finite bound.
  """
  choice = accountants[0] if requested == "auto" else requested
  why = "asked for" if requested != "auto" else _WHY_DEFAULT[choice]
  if any(_without_noise(event) for event, _ in parts):
    return _result(math.inf, delta, choice, "there is no noise")
  if choice == "analytic_gaussian":
    return _result(gaussian_epsilon(parts, delta), delta, choice, why)
  if choice == "rdp":
    return _by_rdp(parts, relation, delta, why)
  try:
    found = pld.epsilon(parts, relation, delta, coarsen)
  except pld.PldError as error:
    return _without_pld(parts, relation, accountants, delta, str(error))
  if found.discretization <= pld.STANDARD_DISCRETIZATION * coarsen and math.isfinite(found.epsilon):
    return _by_pld(found, delta, why)
  limit = "a finer one would exceed the time and memory limits"
  if "rdp" in accountants:
    other = _by_rdp(
      parts, relation, delta, f"smaller than PLD at {found.discretization:g}: {limit}"
    )
    if other.epsilon < found.epsilon:
      return other
  return _by_pld(found, delta, f"{why}; {limit}")


def nothing_released(delta: float) -> Accounted:
  """Returns the account of no releases at all."""
  return _result(0.0, delta, "none", "nothing has been released")


_WHY_DEFAULT = {
  "analytic_gaussian": "exact for Gaussian releases without subsampling",
  "pld": "the tightest for this event",
  "rdp": "the only one for this event",
}


def gaussian_epsilon(parts: Parts, delta: float) -> float:
  """Returns the exact epsilon of Gaussian releases, rounded up (past mu = 10^6, a bound on it).

  Several compose to one of mu = sqrt(sum of count / noise_multiplier^2).

  Balle and Wang 2018, arXiv:1805.06530, theorem 8; Dong, Roth, Su 2019,
  arXiv:1905.02383, corollary 3.3.
  """
  # Not noise_multiplier**2, which raises or vanishes where this is merely infinite or tiny.
  mu = math.hypot(*(math.sqrt(count) * (1 / event.noise_multiplier) for event, count in parts))
  if not mu < _MAX_MU:
    return math.inf
  if mu > _MAX_RESOLVED_MU:
    # P(loss > epsilon) <= exp(-x^2 / 2), where epsilon = mu^2 / 2 + x mu.
    bound = mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))
    return bound * (1 + _ROOT_RELATIVE_ERROR)
  with np.errstate(all="ignore"):  # its search starts where the logarithm of delta is -inf
    exact = dp_accounting.get_epsilon_gaussian(1 / mu, delta)
  return exact * (1 + _ROOT_RELATIVE_ERROR) + _ROOT_ERROR if exact > 0 else 0.0


def _by_rdp(parts: Parts, relation: NeighboringRelation, delta: float, why: str) -> Accounted:
  epsilon, order = rdp.epsilon(parts, relation, delta)
  return _result(epsilon, delta, "rdp", f"{why}; Renyi order {order:g}")


def _by_pld(found: pld.PldEpsilon, delta: float, why: str) -> Accounted:
  reason = f"{why}; discretisation {found.discretization:g}, rounded up"
  result = _result(found.epsilon, delta, "pld", reason)
  return dataclasses.replace(result, discretization=found.discretization)


def _without_pld(
  parts: Parts,
  relation: NeighboringRelation,
  accountants: Sequence[str],
  delta: float,
  error: str,
) -> Accounted:
  if "rdp" in accountants:
    return _by_rdp(parts, relation, delta, f"in place of PLD: {error}")
  return _result(math.inf, delta, "pld", f"no finite bound: {error}, and RDP has no such event")


def _result(epsilon: float, delta: float, accountant: str, reason: str) -> Accounted:
  return Accounted(max(0.0, float(epsilon)), delta, accountant, reason, library_version())


def _without_noise(event: dp_accounting.DpEvent) -> bool:
  inner = event
  while hasattr(inner, "event"):
    inner = inner.event
  noise = getattr(inner, "noise_multiplier", getattr(inner, "standard_deviation", None))
  return noise == 0
