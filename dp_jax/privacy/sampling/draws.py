"""Random bits of a step, and what schemes draw from them: functions of (key, step) alone.

The numbers come from Philox, a counter-based generator, keyed by a hash of the master key and the
step. Nothing is kept between steps, so any step can be drawn again, on any host, in any order.
"""

import numpy as np
from numpy.typing import NDArray

from dp_jax.privacy.master_key import MasterKey

Indices = NDArray[np.int64]

# What draws the units of a step, and the width of its key: both stand in the statement.
GENERATOR = "Philox"
GENERATOR_KEY_BITS = 128


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


def random_subset(bits: np.random.BitGenerator, drawn: Indices, size: int) -> Indices:
  """Returns a uniformly random `size` of `drawn`, sorted: those of the lowest random tag."""
  tags = bits.random_raw(drawn.size)
  return np.sort(drawn[np.argsort(tags, kind="stable")[:size]])
