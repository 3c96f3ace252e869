"""The sampling schemes: which units a step uses. Descriptions only; samplers.py draws."""

import dataclasses
from typing import Any, ClassVar

from dp_jax.errors import UserError
from dp_jax.files import checks

# Below this rate a 64-bit uniform no longer resolves single units.
_MIN_RATE = 2.0**-40


def _check_rate(value: Any) -> float:
  rate = checks.rate("sampling rate", value)
  if rate < _MIN_RATE:
    raise UserError(
      f"sampling rate is {value!r}, finer than the sampler resolves; give at least {_MIN_RATE:.3g}"
    )
  return rate


@dataclasses.dataclass(frozen=True)
class FullBatch:
  """Every step uses every unit."""

  name: ClassVar[str] = "full_batch"

  @property
  def sampling_rate(self) -> float:
    """The probability that a step uses a given unit."""
    return 1.0

  def to_dict(self) -> dict[str, Any]:
    """Returns the scheme as JSON values."""
    return {"name": self.name}


@dataclasses.dataclass(frozen=True)
class Poisson:
  """Each step uses each unit with probability `rate`, independently.

  Attributes:
    rate: the sampling rate, in [2^-40, 1].
  """

  rate: float
  name: ClassVar[str] = "poisson"

  def __post_init__(self) -> None:
    object.__setattr__(self, "rate", _check_rate(self.rate))

  @property
  def sampling_rate(self) -> float:
    """The probability that a step uses a given unit."""
    return self.rate

  def to_dict(self) -> dict[str, Any]:
    """Returns the scheme as JSON values."""
    return {"name": self.name, "rate": self.rate}


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson:
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

  def __post_init__(self) -> None:
    object.__setattr__(self, "rate", _check_rate(self.rate))
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

  def to_dict(self) -> dict[str, Any]:
    """Returns the scheme as JSON values."""
    return {"name": self.name, "rate": self.rate, "cap": self.cap, "num_units": self.num_units}


@dataclasses.dataclass(frozen=True)
class _SizedScheme:
  """What FixedSize and Stream share: a number of units a step, of N."""

  expected_batch_size: int
  num_units: int
  name: ClassVar[str] = ""

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

  def to_dict(self) -> dict[str, Any]:
    """Returns the scheme as JSON values."""
    return {
      "name": self.name,
      "expected_batch_size": self.expected_batch_size,
      "num_units": self.num_units,
    }


@dataclasses.dataclass(frozen=True)
class FixedSize(_SizedScheme):
  """Each step uses a uniformly random subset of exactly `expected_batch_size` units.

  Attributes:
    expected_batch_size: units a step.
    num_units: N, which is public.
  """

  name: ClassVar[str] = "fixed_size"


@dataclasses.dataclass(frozen=True)
class Stream(_SizedScheme):
  """Steps use consecutive blocks of the data, pass after pass, in the order it has.

  Data that was shuffled once, or is shuffled each pass, counts as this: its batches
  are not an independent draw a step, so nothing is amplified and each pass costs a
  full release. The last block of a pass may be short. Correlated noise (DP-FTRL,
  banded matrix factorisation) would be another row for this scheme.

  Attributes:
    expected_batch_size: units a step.
    num_units: N, which is public.
  """

  name: ClassVar[str] = "stream"

  @property
  def steps_per_epoch(self) -> int:
    """Steps in one pass over the data."""
    return -(-self.num_units // self.expected_batch_size)

  def epochs(self, steps: int) -> int:
    """Returns how many passes `steps` steps touch: the most times a unit is used."""
    return -(-steps // self.steps_per_epoch)


Sampling = FullBatch | Poisson | TruncatedPoisson | FixedSize | Stream

SCHEMES: tuple[type[Sampling], ...] = (FullBatch, Poisson, TruncatedPoisson, FixedSize, Stream)


def sampling_from_dict(data: dict[str, Any]) -> Sampling:
  """Builds a scheme from what its `to_dict` returned.

  Args:
    data: {"name": ..., and the scheme's fields}.

  Raises:
    ValueError: if the name or a key is unknown, or a value out of range.
  """
  by_name = {scheme.name: scheme for scheme in SCHEMES}
  name = checks.one_of("sampling", data.get("name"), tuple(by_name))
  scheme = by_name[name]
  fields = tuple(f.name for f in dataclasses.fields(scheme))
  arguments = {key: value for key, value in data.items() if key != "name"}
  checks.only_keys(f"sampling {name}", arguments, fields)
  return scheme(**arguments)
