"""The mechanism of a run: its sampler and its accounting come from this one object."""

import dataclasses
from typing import Any

import dp_accounting

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.accounting import accountants, tails
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling.sampler import Sampler, make_sampler
from dp_jax.privacy.sampling.scheme import Row, Scheme
from dp_jax.privacy.sampling.schemes import find_row, sampling_from_dict
from dp_jax.privacy.spec import ACCOUNTANTS, ADJACENCIES, AccountantName, Adjacency


@dataclasses.dataclass(frozen=True)
class Mechanism:
  """What a run does `steps` times: sample, clip to `clip_norm`, sum, add noise.

  Attributes:
    sampling: the scheme by which a step's units are chosen.
    noise_multiplier: stddev / clip_norm, at least 0 (0 gives an infinite epsilon).
    steps: the planned number of steps, at least 1.
    clip_norm: the bound C on one unit's contribution, above 0. Of all units (full_batch) under
      replace_one, C may be half the most by which exchanging one moves the sum (`Part.bound`).
    adjacency: which data sets are neighbours.
    accountant: which bound is computed.
    declared_batch_size: the expected batch size, where it must not be read from
      the data: under add_or_remove_one, whose neighbours differ in number.

  Raises:
    ValueError: if a field is out of range, or the table of mechanisms has no such
      row; the message names the nearest one that exists.
  """

  sampling: Scheme
  noise_multiplier: float
  steps: int
  clip_norm: float = 1.0
  adjacency: Adjacency = "zero_out"
  accountant: AccountantName = "auto"
  declared_batch_size: float | None = None

  def __post_init__(self) -> None:
    checked = {
      "noise_multiplier": checks.non_negative("noise_multiplier", self.noise_multiplier),
      "steps": checks.integer("steps", self.steps),
      "clip_norm": checks.positive("clip_norm", self.clip_norm),
      "declared_batch_size": (
        None
        if self.declared_batch_size is None
        else checks.positive("declared_batch_size", self.declared_batch_size)
      ),
    }
    for name, value in checked.items():
      object.__setattr__(self, name, value)
    checks.one_of("adjacency", self.adjacency, ADJACENCIES)
    checks.one_of("accountant", self.accountant, ACCOUNTANTS)
    find_row(self.sampling, self.adjacency, self.accountant)

  @property
  def stddev(self) -> float:
    """The standard deviation of the noise on the sum of clipped contributions."""
    return self.noise_multiplier * self.clip_norm

  @property
  def row(self) -> Row:
    """The line of the table of mechanisms that this one is."""
    return find_row(self.sampling, self.adjacency, self.accountant)

  def event(self, steps: int | None = None) -> dp_accounting.DpEvent:
    """Returns what `steps` steps release, as dp-accounting composes it.

    Args:
      steps: from 0 to the planned steps, which is the default.
    """
    steps = self._steps(steps)
    if steps == 0:
      return dp_accounting.NoOpDpEvent()
    release = self.row.release(self.sampling, self.noise_multiplier)
    return dp_accounting.SelfComposedDpEvent(release, self.sampling.releases(steps))

  def parts(self, steps: int | None = None) -> accountants.Parts:
    """Returns the same as `event`, as (event of one release, count) pairs."""
    steps = self._steps(steps)
    if steps == 0:
      return ()
    release = self.row.release(self.sampling, self.noise_multiplier)
    return ((release, self.sampling.releases(steps)),)

  def account(
    self, delta: float, steps: int | None = None, *, sampler_tails: bool = True
  ) -> accountants.Accounted:
    """Returns the epsilon of `steps` steps at `delta`, and how it was found.

    The statement of a run is that of its planned steps, whatever step it stopped at:
    a stop that depends on the outputs does not lower it.

    Args:
      delta: in (0, 1).
      steps: from 0 to the planned steps, which is the default.
      sampler_tails: False accounts for exact Gaussian noise in place of what the
        sampler can return; such a figure is not one to state for a run.

    Raises:
      ValueError: if delta or steps is out of range.
      tails.SamplerTailError: if the noise is so small that the sampler's finite
        range shows at this delta.
      ValueError: if all planned steps are asked for, and the scheme refuses what they cost
        (`TruncationError`).
    """
    delta = checks.open_unit("delta", delta)
    parts = self.parts(steps)
    if not parts:
      return accountants.nothing_released(delta)
    residual = self.tail_delta(steps) if sampler_tails and self.noise_multiplier > 0 else 0.0
    usable = tails.usable_delta(delta, residual, self.noise_multiplier) if residual else delta
    row = self.row
    found = accountants.account_parts(parts, row.relation, row.accountants, self.accountant, usable)
    if self._steps(steps) == self.steps:
      self.sampling.check_account(self.noise_multiplier, self.steps, usable, found)
    return dataclasses.replace(found, delta=delta, tail_delta=residual)

  def epsilon(self, delta: float, steps: int | None = None) -> float:
    """Returns `account(delta, steps).epsilon`."""
    return self.account(delta, steps).epsilon

  def tail_delta(self, steps: int | None = None) -> float:
    """Returns how much of delta the finite range of the noise sampler costs."""
    count = self.sampling.releases(self._steps(steps))
    factor = self.row.sensitivity_factor
    return tails.tail_delta(self.noise_multiplier, count, factor, self.sampling.tail_rate)

  def sampler(self, key: MasterKey, num_units: int) -> Sampler:
    """Returns the sampler that this mechanism was accounted with, for its planned steps.

    Any of steps 0 to `steps` - 1 can be drawn, as often as it is needed; a step beyond is a
    ValueError, since no epsilon stands for it.

    Args:
      key: the run's master key.
      num_units: the number of units in the data.

    Raises:
      ValueError: if num_units is not the number that the scheme declares.
    """
    return make_sampler(self.sampling, key, num_units, self.steps)

  def expected_batch_size(self, num_units: int) -> float:
    """Returns the constant that a step's sum is divided by.

    Args:
      num_units: the number of units in the data; unused where the size is declared.

    Raises:
      ValueError: under add_or_remove_one without a declared size, since neighbours
        would then be divided by different numbers.
    """
    if self.declared_batch_size is not None:
      return self.declared_batch_size
    if self.adjacency == "add_or_remove_one":
      raise UserError(
        "under add_or_remove_one the number of units is not public, so the expected batch size"
        " must be declared: set expected_batch_size, or use adjacency zero_out"
      )
    num_units = checks.integer("num_units", num_units)
    size = getattr(self.sampling, "expected_batch_size", None)
    return float(size) if size is not None else self.sampling.sampling_rate * num_units

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields as JSON values; `from_dict` gives an equal mechanism back."""
    data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return {**data, "sampling": self.sampling.to_dict()}

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "Mechanism":
    """Builds a mechanism from what `to_dict` returned; an unknown key is a ValueError."""
    checks.only_keys("Mechanism", data, tuple(f.name for f in dataclasses.fields(cls)))
    return cls(**{**data, "sampling": sampling_from_dict(data["sampling"])})

  def _steps(self, steps: int | None) -> int:
    if steps is None:
      return self.steps
    steps = checks.integer("steps", steps, minimum=0)
    if steps > self.steps:
      raise UserError(
        f"steps is {steps}, beyond the {self.steps} planned; calibrate a mechanism for that many"
      )
    return steps
