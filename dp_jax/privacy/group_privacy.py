"""What the guarantee is worth to someone who is several units.

Where one person's records are units of their own, the person has the guarantee of a
group. The best way is to make the person the unit; these are the figures otherwise.
"""

import dataclasses
import math

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import stats

from dp_jax.files import checks
from dp_jax.privacy.accounting import accountants as accounting
from dp_jax.privacy.accounting import tails
from dp_jax.privacy.mechanism import Mechanism

# Beyond this the number of sampled units of the group is counted as all of them.
_NEGLIGIBLE = 1e-22
_GENERIC_DELTAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10)


def account_group(mechanism: Mechanism, group_size: int, delta: float) -> accounting.Accounted:
  """Returns the epsilon of a mechanism towards someone who is `group_size` units.

  Args:
    mechanism: the mechanism, whose unit is one record.
    group_size: the most units that one person is.
    delta: in (0, 1), the person's.

  Returns:
    An Accounted; `reason` names the bound. Unsubsampled Gaussian releases and Poisson
    sampling (except under replace_one) have tight ones; anything else takes the
    generic one, which is loose and may be infinite.

  Raises:
    ValueError: if group_size or delta is out of range.
    tails.SamplerTailError: if the noise is too small for the sampler at this delta.

  Choquette-Choo et al. 2023, arXiv:2310.15526 (mixture of Gaussians); Vadhan 2017, "The
  Complexity of Differential Privacy", lemma 2.2 (generic).
  """
  group_size = checks.integer("group_size", group_size)
  delta = checks.open_unit("delta", delta)
  if group_size == 1:
    return mechanism.account(delta)
  row = mechanism.row
  count = mechanism.sampling.releases(mechanism.steps)
  factor = row.sensitivity_factor * group_size
  if row.accountants[0] == "analytic_gaussian":
    event = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier / factor)
    return _tight(mechanism, ((event, count),), row.accountants, delta, factor, "scaled Gaussian")
  if mechanism.sampling.INDEPENDENT and mechanism.adjacency != "replace_one":
    event = _mixture(mechanism, group_size)
    return _tight(mechanism, ((event, count),), ("pld",), delta, factor, "mixture of Gaussians")
  return _generic(mechanism, group_size, delta)


def _mixture(mechanism: Mechanism, group_size: int) -> dp_accounting.DpEvent:
  """The number of the group's units in a batch is binomial, and so is the shift."""
  binomial = stats.binom(group_size, mechanism.sampling.sampling_rate)
  most = int(min(group_size, binomial.isf(_NEGLIGIBLE) + 1))
  probabilities = binomial.pmf(np.arange(most + 1))
  sensitivities = [float(each) for each in range(most + 1)]
  # Whatever is left over counts as the whole group.
  sensitivities[-1] = float(group_size)
  probabilities[-1] = binomial.sf(most - 1)
  probabilities[0] = 1.0 - probabilities[1:].sum()
  return dp_event.MixtureOfGaussiansDpEvent(
    mechanism.noise_multiplier, tuple(sensitivities), tuple(probabilities.tolist())
  )


def _tight(
  mechanism: Mechanism,
  parts: accounting.Parts,
  accountants: tuple[str, ...],
  delta: float,
  factor: float,
  name: str,
) -> accounting.Accounted:
  count = sum(each for _, each in parts)
  rate = min(1.0, factor * mechanism.sampling.tail_rate)
  residual = tails.tail_delta(mechanism.noise_multiplier, count, factor, rate)
  if mechanism.noise_multiplier == 0:
    return mechanism.account(delta)
  usable = tails.usable_delta(delta, residual, mechanism.noise_multiplier)
  relation = NeighboringRelation.ADD_OR_REMOVE_ONE
  found = accounting.account_parts(parts, relation, accountants, "auto", usable)
  reason = f"group bound: {name}; {found.reason}"
  return dataclasses.replace(found, delta=delta, tail_delta=residual, reason=reason)


def _generic(mechanism: Mechanism, group_size: int, delta: float) -> accounting.Accounted:
  """k units at (e, d) each give (k e, d (exp(k e) - 1) / (exp(e) - 1))."""
  for share in _GENERIC_DELTAS:
    try:
      single = mechanism.account(delta * share)
    except tails.SamplerTailError:
      break
    if math.log(share) + _log_growth(single.epsilon, group_size) <= 0:
      return dataclasses.replace(
        single,
        epsilon=group_size * single.epsilon,
        delta=delta,
        reason=f"group bound: generic, from one unit at delta {single.delta:.3g}; {single.reason}",
      )
  return dataclasses.replace(
    mechanism.account(delta),
    epsilon=math.inf,
    reason="group bound: generic, which at this delta promises nothing",
  )


def _log_growth(epsilon: float, group_size: int) -> float:
  """Returns log(sum over i < group_size of exp(i epsilon))."""
  if not math.isfinite(epsilon):
    return math.inf
  return float(np.logaddexp.reduce(np.arange(group_size) * epsilon))
