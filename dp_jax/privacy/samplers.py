"""Drawing a step's units: each sampler is a function of (key, step) alone.

The numbers come from Philox, a counter-based generator, keyed by a hash of the
master key and the step. No sampler keeps state between steps, so any step can be
drawn again, on any host, in any order; but none beyond the steps that were planned,
since what was accounted ends with them.
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_jax.errors import UserError
from dp_jax.files import checks
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling import (
  FixedSize,
  FullBatch,
  Poisson,
  Sampling,
  Stream,
  TruncatedPoisson,
)

Indices = NDArray[np.int64]

_MAX_UNITS = 2**53
# What draws the units of a step, and the width of its key: both stand in the statement.
GENERATOR = "Philox"
GENERATOR_KEY_BITS = 128
# The schemes that draw; the others take all units, or the next.
DRAWN = ("poisson", "truncated_poisson", "fixed_size")


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws the units of each step.

  Attributes:
    num_units: N.
    indices: step -> int64[n], sorted, without repeats, in [0, N). The same
      step gives the same indices whenever it is asked for. A ValueError for a
      step that is no whole number from 0 to one less than the planned steps.
  """

  num_units: int
  indices: Callable[[int], Indices]


def make_sampler(sampling: Sampling, key: MasterKey, num_units: int, steps: int) -> Sampler:
  """Returns the sampler of a scheme, for so many steps.

  Args:
    sampling: the scheme.
    key: the master key; each step uses `key.derive("sampling", step, 16)`.
    num_units: N, the number of units in the data.
    steps: how many are accounted for. Steps are numbered from 0; the sampler refuses
      those beyond, under every scheme.

  Raises:
    ValueError: if N or steps is not positive, or N not the one that the scheme was
      accounted with.
  """
  num_units, steps = checks.integer("num_units", num_units), checks.integer("steps", steps)
  if num_units > _MAX_UNITS:
    raise UserError(f"num_units is {num_units}, more than 2^53; split the data")
  declared = getattr(sampling, "num_units", num_units)
  if declared != num_units:
    raise UserError(
      f"the data has {num_units} units, but the mechanism was accounted for {declared};"
      " calibrate it again with the true number"
    )

  def indices(step: int) -> Indices:
    step = _planned(step, steps)
    if isinstance(sampling, FullBatch):
      return np.arange(num_units, dtype=np.int64)
    if isinstance(sampling, Stream):
      return _block(sampling, step)
    bits = step_generator(key, "sampling", step)
    if isinstance(sampling, FixedSize):
      return _fixed_size(bits, num_units, sampling.expected_batch_size)
    drawn = poisson_indices(bits, num_units, sampling.rate)
    if isinstance(sampling, TruncatedPoisson) and drawn.size > sampling.cap:
      return _random_subset(bits, drawn, sampling.cap)
    return drawn

  if not isinstance(sampling, FullBatch | Poisson | TruncatedPoisson | FixedSize | Stream):
    raise UserError(f"there is no sampler for {sampling!r}; use one of the sampling schemes")
  return Sampler(num_units, indices)


def _planned(step: Any, steps: int) -> int:
  """Returns a step of the plan as an int, or raises ValueError."""
  if isinstance(step, numbers.Integral) and int(step) >= steps:
    raise UserError(
      f"step is {step!r}, beyond the {steps} planned, which are 0 to {steps - 1}: calibrate a"
      " mechanism for more steps before the first, or go on with another mechanism that has a key"
      " and a ledger entry of its own"
    )
  return checks.integer("step", step, minimum=0)


def step_generator(key: MasterKey, purpose: str, step: int) -> np.random.Philox:
  """Returns the bit generator of one (purpose, step), at the start of its stream."""
  secret = key.derive(purpose, step, GENERATOR_KEY_BITS // 8)
  return getattr(np.random, GENERATOR)(key=int.from_bytes(secret, "big"))


def exponentials(bits: np.random.BitGenerator, count: int) -> NDArray[np.float64]:
  """Draws standard exponentials, float64[count], each from 64 bits.

  The uniform's logarithm is taken from whichever end it is closer to, so that small
  values are as finely resolved as large ones (a 53-bit uniform is coarse near 1,
  where the skips of a low sampling rate come from).
  """
  raw = bits.random_raw(count)
  near_zero = raw < np.uint64(2**63)
  distance = np.where(near_zero, raw, ~raw).astype(np.float64) + 0.5
  distance *= 2.0**-64
  return np.where(near_zero, -np.log(distance), -np.log1p(-distance))


def poisson_indices(bits: np.random.BitGenerator, num_units: int, rate: float) -> Indices:
  """Draws each of `num_units` units with probability `rate`, by geometric skips.

  Time and memory grow with rate * num_units. The gaps between units do not depend on
  `num_units`, so the result for N is that for N + 1 without the last unit.

  Args:
    bits: a fresh generator.
    num_units: N.
    rate: the probability of each unit, in (0, 1].

  Returns:
    int64[n], sorted.
  """
  if rate == 1.0:
    return np.arange(num_units, dtype=np.int64)
  log_keep = np.log1p(-rate)
  expected = num_units * rate
  # Enough for one block nearly always; bounded so that the sums below stay in int64.
  block = int(min(expected + 6 * np.sqrt(expected) + 16, 2**20))
  found: list[Indices] = []
  position = -1
  while position < num_units:
    skips = np.minimum(np.floor(exponentials(bits, block) / -log_keep), num_units)
    ends = position + np.cumsum(skips.astype(np.int64) + 1)
    position = int(ends[-1])
    found.append(ends[: np.searchsorted(ends, num_units)])
    block = min(block, 2**16)
  return np.concatenate(found)


def _random_subset(bits: np.random.BitGenerator, drawn: Indices, size: int) -> Indices:
  """Returns a uniformly random `size` of `drawn`, sorted: those of the lowest random tag."""
  tags = bits.random_raw(drawn.size)
  return np.sort(drawn[np.argsort(tags, kind="stable")[:size]])


def _fixed_size(bits: np.random.BitGenerator, num_units: int, size: int) -> Indices:
  chosen = np.random.Generator(bits).choice(num_units, size=size, replace=False, shuffle=False)
  return np.sort(chosen.astype(np.int64))


def _block(sampling: Stream, step: int) -> Indices:
  start = (step % sampling.steps_per_epoch) * sampling.expected_batch_size
  stop = min(start + sampling.expected_batch_size, sampling.num_units)
  return np.arange(start, stop, dtype=np.int64)
