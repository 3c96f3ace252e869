"""Noise as a transform: what a step adds to its sum, and what it remembers for the next one.

Its state is as secret as the key: with it, or with what it remembers of earlier noise, the noise
can be taken away. A run keeps it with its keys, and deletes it with them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.add_noise import add_noise, check_stddev

PyTree = Any


class Noise(NamedTuple):
  """A way to add noise, as a pair of pure functions.

  Attributes:
    init: (params) -> state, arrays of any shapes; () where nothing is remembered.
    update: (total, state, key) -> (noised, state). `total` is the clipped sum of a step, plain or a
      `Compensated` pair; the key is of this step alone; `noised` has leaves float32[...].
  """

  init: Callable[[PyTree], PyTree]
  update: Callable[[PyTree | Compensated, PyTree, jax.Array], tuple[PyTree, PyTree]]


def independent(stddev: float) -> Noise:
  """Gaussian noise that is drawn anew in each step, and remembers nothing.

  Args:
    stddev: noise_multiplier * clip_norm, as `add_noise` takes it.

  Raises:
    ValueError: if stddev is out of range.
  """
  check_stddev(stddev)
  return Noise(lambda params: (), lambda total, state, key: (add_noise(total, stddev, key), state))
