"""What the guarantee means for someone who tests whether a unit was in the data.

Every (epsilon, delta) that a mechanism satisfies bounds every membership test; the mechanism
satisfies a whole curve of them, and their lower envelope is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_jax.privacy.accounting.profile import privacy_profile
from dp_jax.privacy.mechanism import Mechanism

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)

# Past this epsilon the bound says nothing, and its exponential would overflow.
_LARGEST_EPSILON = 500.0


def membership_advantage(epsilon: float, delta: float) -> float:
  """The most that true minus false positive rate can be under (epsilon, delta)-DP.

  Args:
    epsilon: at least 0.
    delta: in [0, 1].

  Returns:
    (e^epsilon - 1 + 2 delta) / (e^epsilon + 1), at most 1.

  Kairouz, Oh, Viswanath 2015, arXiv:1311.0776, Theorem 2.1: the region of error rates.
  """
  # tanh(epsilon / 2) = (e^epsilon - 1) / (e^epsilon + 1), which does not overflow.
  half = math.tanh(epsilon / 2)
  return min(1.0, half + delta * (1 - half))


def attacker_section(mechanism: Mechanism, epsilon: float, delta: float) -> dict[str, Any]:
  """The `attacker` field of privacy.json, all of it derived from the mechanism.

  Args:
    mechanism: the one that ran.
    epsilon: its epsilon at `delta`.
    delta: the stated one.
  """
  lines = _lines(mechanism, delta)
  return {
    "membership_advantage_bound": membership_advantage(epsilon, delta),
    "mechanism_advantage_bound": _largest_advantage(lines),
    "trade_off": [
      {"false_positive_rate": rate, "true_positive_rate_bound": _bound(lines, rate)}
      for rate in FALSE_POSITIVE_RATES
    ],
  }


def curve(record: Mapping[str, Any], points: int = 61) -> list[tuple[float, float]]:
  """(false positive rate, bound on the true positive rate) to be joined by straight lines.

  The bound is concave, so that a chord between two of its points lies below it. Between two rates
  the lines that are active there meet above it: with that point, what is drawn is never below.
  """
  lines = _lines(Mechanism.from_dict(record["mechanism"]), record["delta"])
  rates = np.linspace(0, 1, points)
  active = lines[np.argmin(lines[:, :1] + lines[:, 1:] * rates, axis=0)]
  found = [(0.0, _bound(lines, 0.0))]
  for (a, b), (c, d), rate in zip(active[:-1], active[1:], rates[1:], strict=True):
    if b != d:
      meet = (c - a) / (b - d)
      found.append((float(meet), float(a + b * meet)))
    found.append((float(rate), _bound(lines, float(rate))))
  return found


def epsilon_curve(record: Mapping[str, Any], points: int = 10) -> list[tuple[int, float]]:
  """(step, epsilon spent by then) at the first steps and at `points` more, up to the last one.

  Between two of them what is spent is at most that of the later one, as a staircase shows it.
  """
  mechanism = Mechanism.from_dict(record["mechanism"])
  even = (round(k * mechanism.steps / points) for k in range(1, points + 1))
  steps = sorted({max(1, step) for step in even} | {s for s in (1, 2, 4) if s <= mechanism.steps})
  spent = [(step, mechanism.epsilon(record["delta"], steps=step)) for step in steps]
  return [(0, 0.0), *spent]


def _lines(mechanism: Mechanism, delta: float) -> NDArray[np.float64]:
  """Lines (intercept, slope) above every true positive rate as a function of the false one.

  Under (epsilon, delta)-DP, TPR <= delta + e^epsilon FPR, and the same for the complements:
  1 - FPR <= delta + e^epsilon (1 - TPR). Dong, Roth, Su 2022, arXiv:1905.02383, Proposition 2.5.
  """
  lines = [(1.0, 0.0)]
  for epsilon, each in privacy_profile(mechanism, delta):
    if epsilon <= _LARGEST_EPSILON:
      lines.append((each, math.exp(epsilon)))
      lines.append((1 - math.exp(-epsilon) * (1 - each), math.exp(-epsilon)))
  return np.array(lines)


def _bound(lines: NDArray[np.float64], false_positive_rate: float) -> float:
  return float(np.min(lines[:, 0] + lines[:, 1] * false_positive_rate))


def _largest_advantage(lines: NDArray[np.float64]) -> float:
  """The largest height of the lines' lower envelope above the diagonal.

  The envelope is concave and piecewise linear, so its largest height stands where two lines meet
  or at an end.
  """
  first, second = np.triu_indices(len(lines), k=1)
  slopes = lines[second, 1] - lines[first, 1]
  with np.errstate(divide="ignore", invalid="ignore"):
    meets = (lines[first, 0] - lines[second, 0]) / slopes
  rates = np.concatenate([[0.0, 1.0], meets[np.isfinite(meets) & (meets > 0) & (meets < 1)]])
  return max(0.0, max(_bound(lines, float(rate)) - float(rate) for rate in rates))
