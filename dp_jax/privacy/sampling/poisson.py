"""Each step uses each unit with the same probability, independently."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from dp_jax.privacy.sampling.draws import Indices, poisson_indices
from dp_jax.privacy.sampling.scheme import (
  ADD_REMOVE,
  REPLACE_ONE,
  Row,
  Scheme,
  check_rate,
  rate_of,
)


def poisson_event(sampling: Scheme, noise_multiplier: float) -> dp_accounting.DpEvent:
  """Of a step that uses each unit with probability `sampling_rate`."""
  return dp_accounting.PoissonSampledDpEvent(
    sampling.sampling_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
  )


@dataclasses.dataclass(frozen=True)
class Poisson(Scheme):
  """Each step uses each unit with probability `rate`, independently.

  Attributes:
    rate: the sampling rate, in [2^-40, 1].
  """

  rate: float
  name: ClassVar[str] = "poisson"
  ROWS: ClassVar[tuple[Row, ...]] = (
    Row("poisson", "zero_out", poisson_event, ADD_REMOVE, ("pld", "rdp"), 1.0),
    Row("poisson", "add_or_remove_one", poisson_event, ADD_REMOVE, ("pld", "rdp"), 1.0),
    Row("poisson", "replace_one", poisson_event, REPLACE_ONE, ("pld",), 2.0),
  )
  SETTINGS: ClassVar[Mapping[str, str]] = {"sampling_rate": "rate"}
  CLAUSE: ClassVar[str] = "a Poisson sample (each unit independently with probability {rate})"
  WORDS: ClassVar[str] = "poisson sampling at rate {rate}"
  INDEPENDENT: ClassVar[bool] = True

  def __post_init__(self) -> None:
    object.__setattr__(self, "rate", check_rate(self.rate))

  @property
  def sampling_rate(self) -> float:
    """The probability that a step uses a given unit."""
    return self.rate

  def draw(
    self, generator: Callable[[], np.random.BitGenerator], num_units: int, step: int
  ) -> Indices:
    """By geometric skips."""
    return poisson_indices(generator(), num_units, self.rate)

  @classmethod
  def from_settings(cls, given: Mapping[str, Any], num_units: int) -> Scheme:
    """Needs a rate, or the expected batch size that it is of N."""
    cls.refuse(given, "cap")
    return cls(rate_of(cls, given, num_units))
