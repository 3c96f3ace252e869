"""Two other accountants on either side of the stated epsilon."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as distributions

from dp_jax.privacy.accounting import losses, pld
from dp_jax.privacy.mechanism import Mechanism


@functools.lru_cache(maxsize=64)
def cross_check(mechanism: Mechanism, delta: float) -> dict[str, float | None]:
  """Bounds on the epsilon of a mechanism by other means than the stated one.

  Args:
    mechanism: what ran.
    delta: in (0, 1).

  Returns:
    `optimistic_pld_epsilon`: from privacy loss distributions with every rounding to the optimistic
    side, so that no valid epsilon lies below it; None where the event has no such distribution or
    it cannot be computed. `rdp_epsilon`: from Renyi accounting, an upper bound; None where the
    event has none or no order gives a finite one.
  """
  return {
    "optimistic_pld_epsilon": _optimistic_pld(mechanism, delta),
    "rdp_epsilon": _rdp(mechanism, delta),
  }


def _rdp(mechanism: Mechanism, delta: float) -> float | None:
  if "rdp" not in mechanism.row.accountants:
    return None
  epsilon = dataclasses.replace(mechanism, accountant="rdp").epsilon(delta)
  return epsilon if math.isfinite(epsilon) else None


def _optimistic_pld(mechanism: Mechanism, delta: float) -> float | None:
  ((event, count),) = mechanism.parts()
  relation = mechanism.row.relation
  try:
    pld.check_resolved(mechanism.parts(), delta)
  except pld.PldError:
    return None
  poisson = isinstance(event, dp_accounting.PoissonSampledDpEvent)
  if not poisson and not isinstance(event, dp_accounting.GaussianDpEvent):
    return None
  step = pld.discretization([losses.loss_shape(event, count, relation)], [count])
  # Gaussian releases compose to one Gaussian of less noise; subsampled ones do not.
  noise = event.event.noise_multiplier if poisson else event.noise_multiplier / math.sqrt(count)
  rate = event.sampling_probability if poisson else 1.0
  epsilon = _epsilon(noise, rate, relation, step, count if poisson else 1, delta)
  return epsilon if math.isfinite(epsilon) else None


def _epsilon(
  noise: float, rate: float, relation: Any, step: float, count: int, delta: float
) -> float:
  with np.errstate(all="ignore"), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
      single = distributions.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=step,
        neighboring_relation=relation,
      )
      composed = pld.self_compose(single, count)
      return max(0.0, float(composed.get_epsilon_for_delta(delta)))
    except pld.FAILURES:
      return math.inf
