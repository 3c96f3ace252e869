"""The cliff of truncated Poisson sampling: a cap that cuts often costs more than it saves."""

import math

import dp_accounting
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import stats

from dp_jax.errors import UserError
from dp_jax.privacy.accounting import accountants
from dp_jax.privacy.sampling import Sampling, TruncatedPoisson

# How much of epsilon the cap may cost before it is refused.
_MAX_RATIO = 1.1
_NEGLIGIBLE = 1e-3


class TruncationError(UserError):
  """The cap is so low that epsilon jumps."""


def refuse_cliff(
  sampling: Sampling,
  noise_multiplier: float,
  steps: int,
  delta: float,
  found: accountants.Accounted,
) -> None:
  """Raises TruncationError if the cap raises epsilon by more than a tenth.

  Args:
    sampling: any scheme; only TruncatedPoisson has a cap.
    noise_multiplier: stddev / clip_norm.
    steps: planned steps.
    delta: what the accountant may spend.
    found: the account with the cap.
  """
  if not isinstance(sampling, TruncatedPoisson) or noise_multiplier == 0:
    return
  event = dp_accounting.PoissonSampledDpEvent(
    sampling.rate, dp_accounting.GaussianDpEvent(noise_multiplier)
  )
  relation = NeighboringRelation.ADD_OR_REMOVE_ONE
  plain = accountants.account_parts(((event, steps),), relation, ("pld", "rdp"), "auto", delta)
  if found.epsilon <= _MAX_RATIO * plain.epsilon + _NEGLIGIBLE:
    return
  raise TruncationError(
    f"cap {sampling.cap} is over the cliff of truncated sampling: batches of"
    f" {sampling.rate * sampling.num_units:.6g} on average are cut so often that epsilon jumps from"
    f" {plain.epsilon:.4g} to {found.epsilon:.4g}; raise the cap to at least"
    f" {harmless_cap(sampling, steps, delta)}, or use poisson, which needs no cap"
  )


def harmless_cap(sampling: TruncatedPoisson, steps: int, delta: float) -> int:
  """Returns a cap that the batches of all steps stay under, but for a hundredth of delta."""
  tail = 0.01 * delta / steps
  cap = stats.binom.isf(tail, sampling.num_units, sampling.rate)
  return int(min(sampling.num_units, math.ceil(cap) + 1))
