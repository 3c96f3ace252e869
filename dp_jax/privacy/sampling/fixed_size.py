"""Each step uses a random subset of a fixed size."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import dp_accounting
import numpy as np

from dp_jax.privacy.sampling.draws import Indices
from dp_jax.privacy.sampling.scheme import REPLACE_ONE, Row, SizedScheme


def _event(sampling: "FixedSize", noise_multiplier: float) -> dp_accounting.DpEvent:
  return dp_accounting.SampledWithoutReplacementDpEvent(
    sampling.num_units,
    sampling.expected_batch_size,
    dp_accounting.GaussianDpEvent(noise_multiplier / 2),
  )


@dataclasses.dataclass(frozen=True)
class FixedSize(SizedScheme):
  """Each step uses a uniformly random subset of exactly `expected_batch_size` units.

  Attributes:
    expected_batch_size: units a step.
    num_units: N, which is public.
  """

  name: ClassVar[str] = "fixed_size"
  ROWS: ClassVar[tuple[Row, ...]] = (
    Row("fixed_size", "replace_one", _event, REPLACE_ONE, ("rdp",), 2.0),
  )
  CLAUSE: ClassVar[str] = "a uniform sample of {size} units without replacement"
  WORDS: ClassVar[str] = "fixed size sampling at rate {rate}"

  def draw(
    self, generator: Callable[[], np.random.BitGenerator], num_units: int, step: int
  ) -> Indices:
    """Without replacement."""
    chosen = np.random.Generator(generator()).choice(
      num_units, size=self.expected_batch_size, replace=False, shuffle=False
    )
    return np.sort(chosen.astype(np.int64))
