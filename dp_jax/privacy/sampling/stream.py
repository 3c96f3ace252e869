"""Blocks of the data in the order it has."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from dp_jax.privacy.sampling.draws import Indices
from dp_jax.privacy.sampling.scheme import (
  ADD_REMOVE,
  GAUSSIAN_ACCOUNTANTS,
  Row,
  SizedScheme,
  gaussian,
  gaussian_of_twice,
)


@dataclasses.dataclass(frozen=True)
class Stream(SizedScheme):
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
  ROWS: ClassVar[tuple[Row, ...]] = (
    Row("stream", "zero_out", gaussian, ADD_REMOVE, GAUSSIAN_ACCOUNTANTS, 1.0),
    Row("stream", "replace_one", gaussian_of_twice, ADD_REMOVE, GAUSSIAN_ACCOUNTANTS, 2.0),
  )
  CLAUSE: ClassVar[str] = "the next {size} units in a fixed order (no amplification by sampling)"
  WORDS: ClassVar[str] = "stream sampling at rate {rate}"
  DRAWS: ClassVar[bool] = False

  @property
  def tail_rate(self) -> float:
    """A pass over the data uses every unit."""
    return 1.0

  @property
  def steps_per_release(self) -> int:
    """Steps in one pass over the data, which is the most that one unit is used in."""
    return -(-self.num_units // self.expected_batch_size)

  def draw(
    self, generator: Callable[[], np.random.BitGenerator], num_units: int, step: int
  ) -> Indices:
    """The next block."""
    start = (step % self.steps_per_release) * self.expected_batch_size
    stop = min(start + self.expected_batch_size, self.num_units)
    return np.arange(start, stop, dtype=np.int64)
