"""The privacy profile: all (epsilon, delta) that a mechanism satisfies, not only the stated one."""

import dataclasses
import functools
import math

import numpy as np

from dp_jax.privacy.accounting import pld
from dp_jax.privacy.mechanism import Mechanism

_NUM_POINTS = 81
_LARGEST_DELTA = 0.9
# What a loss distribution resolves whatever the number of steps; tests of membership that succeed
# often enough to matter depend on deltas no smaller.
_RESOLVED_DELTA = 1e-3
# Rounding in the sums that turn a loss distribution into a delta.
_SUM_ERROR = 1e-11


@functools.lru_cache(maxsize=64)
def privacy_profile(mechanism: Mechanism, delta: float) -> tuple[tuple[float, float], ...]:
  """Returns (epsilon, delta) pairs, all of which the mechanism satisfies at once.

  A loss distribution is composed once and read at many epsilons; the other accountants
  are asked at many deltas.

  Args:
    mechanism: the whole of it, all planned steps.
    delta: in (0, 1), the stated one. The pairs spread around it, as far as tests with
      false positive rates of a thousandth and more can tell.

  Returns:
    Pairs by increasing epsilon, each with the sampler's tails in its delta.
  """
  found = mechanism.account(delta)
  if found.discretization is not None and math.isfinite(found.epsilon):
    return _from_distribution(mechanism, found.epsilon, found.discretization)
  fell_back = found.accountant == "rdp" and mechanism.accountant in ("auto", "pld")
  if fell_back and "pld" in mechanism.row.accountants and math.isfinite(found.epsilon):
    # Only the stated delta is too small for a loss distribution.
    coarse = mechanism.account(max(delta, _RESOLVED_DELTA))
    if coarse.discretization is not None and math.isfinite(coarse.epsilon):
      pairs = _from_distribution(mechanism, coarse.epsilon, coarse.discretization)
      better = tuple(pair for pair in pairs if pair[0] < found.epsilon and pair[1] > delta)
      return (*better, (found.epsilon, delta))
    return _from_deltas(dataclasses.replace(mechanism, accountant="rdp"), delta)
  return _from_deltas(mechanism, delta)


def _from_distribution(
  mechanism: Mechanism, epsilon: float, discretization: float
) -> tuple[tuple[float, float], ...]:
  epsilons = np.linspace(0.0, 2 * max(epsilon, 0.05), _NUM_POINTS).tolist()
  deltas = pld.deltas(mechanism.parts(), mechanism.row.relation, epsilons, discretization)
  slack = _SUM_ERROR + mechanism.tail_delta()
  return tuple(
    (each, min(1.0, float(found) + slack)) for each, found in zip(epsilons, deltas, strict=True)
  )


def _from_deltas(mechanism: Mechanism, delta: float) -> tuple[tuple[float, float], ...]:
  top = max(delta, _LARGEST_DELTA)
  found = []
  for each in np.geomspace(delta, top, _NUM_POINTS).tolist():
    epsilon = mechanism.epsilon(each)
    if math.isfinite(epsilon):
      found.append((epsilon, each))
    if epsilon == 0:
      break  # a larger delta adds nothing
  return tuple(reversed(found))
