"""Every step uses every unit."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from dp_jax.privacy.sampling.draws import Indices
from dp_jax.privacy.sampling.scheme import (
  ADD_REMOVE,
  GAUSSIAN_ACCOUNTANTS,
  Row,
  Scheme,
  gaussian,
  gaussian_of_twice,
)


@dataclasses.dataclass(frozen=True)
class FullBatch(Scheme):
  """Every step uses every unit."""

  name: ClassVar[str] = "full_batch"
  ROWS: ClassVar[tuple[Row, ...]] = (
    Row("full_batch", "zero_out", gaussian, ADD_REMOVE, GAUSSIAN_ACCOUNTANTS, 1.0),
    Row("full_batch", "add_or_remove_one", gaussian, ADD_REMOVE, GAUSSIAN_ACCOUNTANTS, 1.0),
    # PLD's own REPLACE_ONE would double again, RDP's would not.
    Row("full_batch", "replace_one", gaussian_of_twice, ADD_REMOVE, GAUSSIAN_ACCOUNTANTS, 2.0),
  )
  CLAUSE: ClassVar[str] = "all units"
  WORDS: ClassVar[str] = "all units in each step"
  DRAWS: ClassVar[bool] = False

  @property
  def sampling_rate(self) -> float:
    """The probability that a step uses a given unit."""
    return 1.0

  def draw(
    self, generator: Callable[[], np.random.BitGenerator], num_units: int, step: int
  ) -> Indices:
    """All of them."""
    return np.arange(num_units, dtype=np.int64)

  @classmethod
  def from_settings(cls, given: Mapping[str, Any], num_units: int) -> Scheme:
    """Takes no settings; the divisor may be declared."""
    cls.refuse(given, "cap", "sampling_rate")
    return cls()
