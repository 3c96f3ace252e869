"""Poisson sampling of at most so many units a step, and its cliff.

A cap that cuts often costs more than it saves: epsilon jumps.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from scipy import stats

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.accounting import accountants
from dp_jax.privacy.sampling.draws import Indices, poisson_indices, random_subset
from dp_jax.privacy.sampling.poisson import poisson_event
from dp_jax.privacy.sampling.scheme import (
  ADD_REMOVE,
  REPLACE_SPECIAL,
  Row,
  Scheme,
  check_rate,
  rate_of,
)

# How much of epsilon the cap may cost before it is refused.
_MAX_RATIO = 1.1
_NEGLIGIBLE = 1e-3


class TruncationError(UserError):
  """The cap is so low that epsilon jumps."""


def _event(sampling: "TruncatedPoisson", noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_event.TruncatedSubsampledGaussianDpEvent(
    sampling.num_units, sampling.rate, sampling.cap, noise_multiplier
  )


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Scheme):
  """Poisson, but a draw of more than `cap` units is cut to a random `cap` of them.

  Attributes:
    rate: the rate before the cut.
    cap: the most units that a step uses, at least rate * num_units, and better well above.
    num_units: N, which is public.

  Ganesh 2025, arXiv:2508.15089.
  """

  rate: float
  cap: int
  num_units: int
  name: ClassVar[str] = "truncated_poisson"
  ROWS: ClassVar[tuple[Row, ...]] = (
    Row("truncated_poisson", "zero_out", _event, REPLACE_SPECIAL, ("pld",), 1.0),
  )
  SETTINGS: ClassVar[Mapping[str, str]] = {
    "sampling_rate": "rate", "cap": "cap", "num_units": "num_units",
  }  # fmt: skip
  CLAUSE: ClassVar[str] = (
    "a Poisson sample (probability {rate} for each unit) cut to at most {cap} units"
  )
  WORDS: ClassVar[str] = "truncated poisson sampling at rate {rate}"

  def __post_init__(self) -> None:
    object.__setattr__(self, "rate", check_rate(self.rate))
    object.__setattr__(self, "cap", checks.integer("cap", self.cap))
    object.__setattr__(self, "num_units", checks.integer("num_units", self.num_units))
    if self.cap < self.rate * self.num_units * (1 - 1e-9):
      raise UserError(
        f"cap {self.cap} is below the average batch of {self.rate * self.num_units:.6g}: most"
        " batches would be cut, far over the cliff of truncated sampling; raise the cap well above"
        " that; nearest row: fixed_size under 'replace_one'"
      )

  @property
  def sampling_rate(self) -> float:
    """An upper bound of the probability that a step uses a given unit."""
    return self.rate

  def draw(
    self, generator: Callable[[], np.random.BitGenerator], num_units: int, step: int
  ) -> Indices:
    """As Poisson, and of too many a random part."""
    bits = generator()
    drawn = poisson_indices(bits, num_units, self.rate)
    return random_subset(bits, drawn, self.cap) if drawn.size > self.cap else drawn

  @classmethod
  def from_settings(cls, given: Mapping[str, Any], num_units: int) -> Scheme:
    """Needs a rate, or the expected batch size that it is of N, and a cap."""
    rate = rate_of(cls, given, num_units)
    if given["cap"] is None:
      raise UserError(f"sampling {cls.name!r} needs privacy.cap.")
    return cls(rate, given["cap"], num_units)

  def check_account(
    self, noise_multiplier: float, steps: int, delta: float, found: accountants.Accounted
  ) -> None:
    """Raises TruncationError if the cap raises epsilon by more than a tenth.

    Args:
      noise_multiplier: stddev / clip_norm.
      steps: planned steps.
      delta: what the accountant may spend.
      found: the account with the cap.
    """
    if noise_multiplier == 0:
      return
    event = poisson_event(self, noise_multiplier)
    plain = accountants.account_parts(((event, steps),), ADD_REMOVE, ("pld", "rdp"), "auto", delta)
    if found.epsilon <= _MAX_RATIO * plain.epsilon + _NEGLIGIBLE:
      return
    raise TruncationError(
      f"cap {self.cap} is over the cliff of truncated sampling: batches of"
      f" {self.rate * self.num_units:.6g} on average are cut so often that epsilon jumps from"
      f" {plain.epsilon:.4g} to {found.epsilon:.4g}; raise the cap to at least"
      f" {harmless_cap(self, steps, delta)}, or use poisson, which needs no cap"
    )


def harmless_cap(sampling: TruncatedPoisson, steps: int, delta: float) -> int:
  """Returns a cap that the batches of all steps stay under, but for a hundredth of delta."""
  tail = 0.01 * delta / steps
  cap = stats.binom.isf(tail, sampling.num_units, sampling.rate)
  return int(min(sampling.num_units, math.ceil(cap) + 1))
