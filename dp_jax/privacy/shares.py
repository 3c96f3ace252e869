"""Several releases under one budget, each with a declared share of it."""

import dataclasses
import math
from collections.abc import Sequence

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.accounting import composition
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec

_SUM_TOLERANCE = 1e-9
# A total above its target by rounding alone is brought under it by steps of this size.
_NUDGE = 1e-7


@dataclasses.dataclass(frozen=True)
class Part:
  """One of several releases, each over all units.

  Attributes:
    purpose: what is released, in words; it names the entry in the ledger.
    share: of the budget, above 0. Shares are of mu^2, which adds up under composition.
    steps: how often it is released, each time with the same noise.
    clip_norm: the bound on one unit's contribution, in units of what is summed.
    exchanged: the most by which exchanging one unit moves what is released, for replace_one. None
      stands for 2 clip_norm, which always holds; contributions that cannot be opposite, such as
      positive semidefinite matrices, give less.

  Raises:
    ValueError: if the share is not positive, or `exchanged` is not from one to two clip norms: a
      unit can be exchanged for a blank one, and two contributions differ by two clip norms at most.
  """

  purpose: str
  share: float
  steps: int = 1
  clip_norm: float = 1.0
  exchanged: float | None = None

  def __post_init__(self) -> None:
    checks.positive(f"the share of {self.purpose}", self.share)
    if self.exchanged is None:
      return
    exchanged = checks.positive(f"exchanged of {self.purpose}", self.exchanged)
    if not self.clip_norm <= exchanged <= 2 * self.clip_norm:
      raise UserError(
        f"exchanged of {self.purpose} is {self.exchanged!r}; with contributions of at most"
        f" {self.clip_norm!r} give from {self.clip_norm!r} to {2 * self.clip_norm!r}, or None"
      )

  def bound(self, adjacency: str) -> float:
    """The clip norm of its mechanism: under replace_one half of what an exchange moves.

    The table's row for full_batch under replace_one is of sums that move by two clip norms, and of
    nothing else: every unit is in every sum, so that a unit on its own is never compared with none.
    """
    if adjacency == "replace_one" and self.exchanged is not None:
      return self.exchanged / 2
    return self.clip_norm


def calibrate_parts(
  spec: PrivacySpec, parts: Sequence[Part], declared_batch_size: float | None = None
) -> tuple[Mechanism, ...]:
  """Returns the mechanism of each part, so that all of them together meet the target.

  Gaussian releases of mu_1, mu_2, ... compose to one of mu^2 = mu_1^2 + mu_2^2 + ..., also where
  a later one depends on the outputs of earlier ones (Dong, Roth, Su 2019, arXiv:1905.02383,
  corollary 3.3). A part with share s and T steps gets mu^2 = s mu_target^2 / T a step.

  Args:
    spec: the target; the accountant is "auto" or "analytic_gaussian", which is exact here.
    parts: their shares add up to 1, and their purposes differ.
    declared_batch_size: see Mechanism.

  Raises:
    ValueError: if the shares do not add up to 1, a purpose repeats, the accountant is another, or
      the target cannot be met.
  """
  total = math.fsum(part.share for part in parts)
  if abs(total - 1) > _SUM_TOLERANCE:
    listed = ", ".join(f"{part.purpose} {part.share:g}" for part in parts)
    raise UserError(f"the shares of the budget add up to {total:.6g}, not to 1: {listed}")
  if len({part.purpose for part in parts}) != len(parts):
    raise UserError(f"purposes repeat: {', '.join(part.purpose for part in parts)}")
  if spec.accountant not in ("auto", "analytic_gaussian"):
    raise UserError(
      f"accountant {spec.accountant!r} is looser than the exact curve, which several Gaussian"
      " releases have; use 'auto'"
    )
  whole = calibrate(spec, FullBatch(), 1, 1.0, declared_batch_size)
  factor = 1.0
  while True:
    found = tuple(_mechanism(whole, part, factor) for part in parts)
    if account(found, spec.delta).epsilon <= spec.epsilon:
      return found
    factor *= 1 + _NUDGE


def account(mechanisms: Sequence[Mechanism], delta: float) -> composition.accounting.Accounted:
  """Returns the epsilon of all mechanisms together, none of which is subsampled."""
  return composition.account_releases([composition.PlannedRelease(m) for m in mechanisms], delta)


def joint(mechanisms: Sequence[Mechanism]) -> Mechanism:
  """Returns the one release that is as private as all of these together.

  What they release, each in units of its clip norm and weighted by its precision, is one vector
  that neighbours move by at most 1, or 2 under replace_one; its noise multiplier is
  1 / sqrt(sum of steps / noise_multiplier^2).

  Raises:
    ValueError: if one of them is not over all units, or adjacencies differ.
  """
  schemes = {type(mechanism.sampling) for mechanism in mechanisms}
  adjacencies = {mechanism.adjacency for mechanism in mechanisms}
  if schemes != {FullBatch} or len(adjacencies) != 1:
    names = sorted(scheme.name for scheme in schemes)
    raise UserError(
      f"releases by {', '.join(names)} under {', '.join(sorted(adjacencies))} are not"
      " one Gaussian release; every one has to be full_batch, under one adjacency"
    )
  first = mechanisms[0]
  if len(mechanisms) == 1 and first.steps == 1 and first.clip_norm == 1:
    return first
  precision = math.fsum(each.steps / each.noise_multiplier**2 for each in mechanisms)
  return dataclasses.replace(first, noise_multiplier=precision**-0.5, steps=1, clip_norm=1.0)


def _mechanism(whole: Mechanism, part: Part, factor: float) -> Mechanism:
  noise = whole.noise_multiplier * math.sqrt(part.steps / part.share) * factor
  clip_norm = part.bound(whole.adjacency)
  return dataclasses.replace(whole, noise_multiplier=noise, steps=part.steps, clip_norm=clip_norm)
