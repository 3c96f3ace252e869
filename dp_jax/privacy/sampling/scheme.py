"""What a sampling scheme is: its draws, its events, its settings and its words, in one class.

A pair of scheme and adjacency that is no row of its scheme is refused. dp-accounting's accountants
read `noise_multiplier` differently under REPLACE_ONE (PLD doubles the sensitivity itself, RDP does
not), so each row says what is handed to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.accounting.accountants import Accounted
from dp_jax.privacy.sampling.draws import Indices

# (scheme, noise_multiplier) -> the event of one release.
EventOf = Callable[[Any, float], dp_accounting.DpEvent]

ADD_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
REPLACE_SPECIAL = NeighboringRelation.REPLACE_SPECIAL
GAUSSIAN_ACCOUNTANTS = ("analytic_gaussian", "pld", "rdp")
# Below this rate a 64-bit uniform no longer resolves single units.
_MIN_RATE = 2.0**-40


@dataclasses.dataclass(frozen=True)
class Row:
  """A scheme under one adjacency.

  Attributes:
    scheme: the sampling scheme's name.
    adjacency: the neighbours.
    release: the event of one release, given the scheme and the noise multiplier.
    relation: dp-accounting's neighbouring relation for that event.
    accountants: those that can compose it; the first is the default.
    sensitivity_factor: by how many clip norms the sums of neighbours can differ.
  """

  scheme: str
  adjacency: str
  release: EventOf
  relation: NeighboringRelation
  accountants: tuple[str, ...]
  sensitivity_factor: float


@dataclasses.dataclass(frozen=True)
class Scheme:
  """A sampling scheme; its fields are its parameters, which are public.

  A scheme of your own is a subclass in a file of this folder, and its name in `schemes.SCHEMES`.

  Attributes:
    name: as configurations and records have it.
    ROWS: the adjacencies under which it is accounted for.
    SETTINGS: the settings that it needs, among sampling_rate, expected_batch_size, cap and
      num_units, and the field that each sets.
    CLAUSE: what a step uses, for the statement; {rate}, {size} and integer fields are filled in.
    WORDS: the same for a list of settings; {rate}.
    DRAWS: whether it draws at random.
    INDEPENDENT: whether each unit takes part by a draw of its own, with probability sampling_rate.
  """

  name: ClassVar[str] = ""
  ROWS: ClassVar[tuple[Row, ...]] = ()
  SETTINGS: ClassVar[Mapping[str, str]] = {}
  CLAUSE: ClassVar[str] = ""
  WORDS: ClassVar[str] = ""
  DRAWS: ClassVar[bool] = True
  INDEPENDENT: ClassVar[bool] = False

  @property
  def sampling_rate(self) -> float:
    """The probability that a step uses a given unit, or an upper bound of it."""
    raise NotImplementedError

  @property
  def tail_rate(self) -> float:
    """The probability that a release of those counted by `releases` uses a given unit."""
    return self.sampling_rate

  @property
  def steps_per_release(self) -> int:
    """How many steps one release of `Row.release` stands for."""
    return 1

  def releases(self, steps: int) -> int:
    """Returns how many releases `steps` steps compose to."""
    return -(-steps // self.steps_per_release)

  def draw(
    self, generator: Callable[[], np.random.BitGenerator], num_units: int, step: int
  ) -> Indices:
    """The units of a step: int64[n], sorted, without repeats, in [0, num_units).

    Args:
      generator: gives the random bits of this step, from their start.
      num_units: N.
      step: its number, from 0.
    """
    raise NotImplementedError

  def check_account(
    self, noise_multiplier: float, steps: int, delta: float, found: Accounted
  ) -> None:
    """Refuses a scheme that costs far more than another that does the same; most do not."""

  def to_dict(self) -> dict[str, Any]:
    """Returns the scheme as JSON values."""
    return {"name": self.name, **dataclasses.asdict(self)}

  @classmethod
  def from_settings(cls, given: Mapping[str, Any], num_units: int) -> Scheme:
    """The scheme of a configuration.

    Args:
      given: sampling_rate, expected_batch_size and cap, None where they are not set.
      num_units: N, as the data have it.

    Raises:
      ValueError: if a setting is missing, or has no meaning here.
    """
    raise NotImplementedError

  @classmethod
  def refuse(cls, given: Mapping[str, Any], *names: str) -> None:
    """Refuses settings that have no meaning under the scheme."""
    for name in names:
      if given[name] is not None:
        raise UserError(f"privacy.{name}={given[name]} has no meaning under sampling {cls.name!r}.")

  def row(self, adjacency: str, accountant: str = "auto") -> Row:
    """Returns the row under an adjacency.

    Args:
      adjacency: the neighbours.
      accountant: "auto", or one that the row must have.

    Raises:
      ValueError: if there is no such row, or the row has no such accountant; the message names the
        nearest that exists.
    """
    for row in self.ROWS:
      if row.adjacency == adjacency:
        if accountant == "auto" or accountant in row.accountants:
          return row
        raise UserError(
          f"accountant {accountant!r} cannot compose {self.name} under {adjacency};"
          f" nearest that can: {row.accountants[0]!r}"
        )
    nearest = self.ROWS[0]
    raise UserError(
      f"sampling {self.name} has no accounting under adjacency {adjacency!r};"
      f" nearest row: {nearest.scheme} under {nearest.adjacency!r} by {nearest.accountants[0]}"
    )


def check_rate(value: Any) -> float:
  """A sampling rate that the sampler resolves, in [2^-40, 1]."""
  rate = checks.rate("sampling rate", value)
  if rate < _MIN_RATE:
    raise UserError(
      f"sampling rate is {value!r}, finer than the sampler resolves; give at least {_MIN_RATE:.3g}"
    )
  return rate


def rate_of(cls: type[Scheme], given: Mapping[str, Any], num_units: int) -> float:
  """The sampling rate of a configuration: given, or from the expected batch size."""
  rate, size = given["sampling_rate"], given["expected_batch_size"]
  if rate is None and size is None:
    raise UserError(f"sampling {cls.name!r} needs privacy.sampling_rate or expected_batch_size.")
  return size / num_units if rate is None else rate


def gaussian(sampling: Scheme, noise_multiplier: float) -> dp_accounting.DpEvent:
  """Of sums that neighbours move by one clip norm."""
  return dp_accounting.GaussianDpEvent(noise_multiplier)


def gaussian_of_twice(sampling: Scheme, noise_multiplier: float) -> dp_accounting.DpEvent:
  """Of sums that neighbours move by two clip norms."""
  return dp_accounting.GaussianDpEvent(noise_multiplier / 2)


@dataclasses.dataclass(frozen=True)
class SizedScheme(Scheme):
  """A number of units a step, of N."""

  expected_batch_size: int
  num_units: int
  SETTINGS: ClassVar[Mapping[str, str]] = {
    "expected_batch_size": "expected_batch_size", "num_units": "num_units",
  }  # fmt: skip

  def __post_init__(self) -> None:
    for field in ("expected_batch_size", "num_units"):
      object.__setattr__(self, field, checks.integer(field, getattr(self, field)))
    if self.expected_batch_size > self.num_units:
      raise UserError(
        f"expected_batch_size is {self.expected_batch_size}, more than the {self.num_units} units;"
        " give at most num_units"
      )

  @property
  def sampling_rate(self) -> float:
    """The share of the units that a step uses."""
    return self.expected_batch_size / self.num_units

  @classmethod
  def from_settings(cls, given: Mapping[str, Any], num_units: int) -> Scheme:
    """Needs a whole expected_batch_size."""
    cls.refuse(given, "cap", "sampling_rate")
    size = given["expected_batch_size"]
    if size is None or size != int(size):
      raise UserError(
        f"sampling {cls.name!r} needs a whole privacy.expected_batch_size, got {size}."
      )
    return cls(int(size), num_units)
