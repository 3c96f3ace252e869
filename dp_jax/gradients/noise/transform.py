"""Noise as a transform, for the training loop and for chains of optax alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.add_noise import add_noise, check_stddev

PyTree = Any


class Noise(NamedTuple):
  """What is added to the sum of each step, and what is kept for the steps after it.

  The state is as secret as the key: noise that depends on earlier noise keeps some of that. It is
  deleted with the key, before anything is released. It holds arrays of numbers; those that have the
  shape of a parameter are spread over the devices as that is.

  Attributes:
    init: (params) -> state, before step 0; () for noise that keeps nothing.
    update: (total, state, key) -> (noised, state). `total` is a pair of trees of float32[...];
      `noised` has leaves float32[...], on a public grid, as of `add_noise`. The key is of this step
      and no other. What it adds from its state goes into the pair before `add_noise`.
  """

  init: Callable[[PyTree], PyTree]
  update: Callable[[Compensated, PyTree, jax.Array], tuple[PyTree, PyTree]]


# From the standard deviation of a step, noise_multiplier * clip_norm.
MakeNoise = Callable[[float], Noise]


def independent(stddev: float) -> Noise:
  """Gaussian noise that is drawn anew for each sum; its state is empty.

  Args:
    stddev: as of `add_noise`.

  Raises:
    ValueError: if stddev is out of range.
  """
  check_stddev(stddev)
  return Noise(lambda params: (), lambda total, state, key: (add_noise(total, stddev, key), state))


# For runs without privacy.
NO_NOISE = Noise(lambda params: (), lambda total, state, key: (pairs.collapse(total), state))
