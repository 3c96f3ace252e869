"""A sampler ends with the steps of its mechanism: nobody accounted for what is drawn beyond."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from dp_jax.privacy import (
  FixedSize,
  FullBatch,
  MasterKey,
  Mechanism,
  Poisson,
  PrivacySpec,
  Stream,
  TruncatedPoisson,
  calibrate,
)
from dp_jax.privacy.sampling.sampler import make_sampler

KEY = MasterKey(bytes(range(32)))
SCHEMES = [
  FullBatch(), Poisson(0.1), Poisson(1.0), TruncatedPoisson(0.4, 21, 50), FixedSize(7, 50),
  Stream(7, 50),
]  # fmt: skip


def sampler(sampling, num_units, steps):
  adjacency = "replace_one" if sampling.name == "fixed_size" else "zero_out"
  return Mechanism(sampling, 1.0, steps, adjacency=adjacency).sampler(KEY, num_units)


NO_STEPS = (-1, 1.5, 2.0, np.float64(1), float("nan"), "1", None, True, np.True_, np.array([1, 2]))


@pytest.mark.parametrize("sampling", SCHEMES)
def test_steps_beyond_the_plan_are_refused(sampling):
  drawn = sampler(sampling, 50, 3)
  for step in (2, 0, 1, 2, np.int64(1), np.uint8(2)):
    drawn.indices(step)
  for step in (3, 4, 10**6, 2**60, 2**70, np.int64(3), np.uint32(7)):
    with pytest.raises(ValueError, match=rf"step is .*{int(step)}.* beyond the 3 planned.*ledger"):
      drawn.indices(step)
  for step in NO_STEPS:
    with pytest.raises(ValueError, match=r"step is .*give a whole number of at least 0"):
      drawn.indices(step)
  other = dataclasses.replace(drawn, num_units=50)
  with pytest.raises(ValueError, match="beyond the 3 planned"):
    other.indices(3)
  # One that is traced has no value to compare.
  with pytest.raises(ValueError, match="not a whole number"):
    jax.eval_shape(lambda step: drawn.indices(step).size, 0)


def test_each_sampler_ends_with_the_plan_of_its_own_mechanism():
  short = Mechanism(Poisson(0.5), 1.0, 2)
  longer = dataclasses.replace(short, steps=3)
  with pytest.raises(ValueError, match="beyond the 2 planned"):
    short.sampler(KEY, 5).indices(2)
  np.testing.assert_array_equal(
    longer.sampler(KEY, 5).indices(2), sampler(Poisson(0.5), 5, 9).indices(2)
  )
  with pytest.raises(TypeError):
    make_sampler(Poisson(0.5), KEY, 5)
  for steps in (0, -1, 1.5):
    with pytest.raises(ValueError, match="steps is"):
      make_sampler(Poisson(0.5), KEY, 5, steps)


def test_what_steps_beyond_the_plan_would_cost():
  """The broken variant draws on, and at the noise of 10 steps, 30 are far over the target."""
  mechanism = calibrate(PrivacySpec(1.0, 1e-5), Poisson(0.01), 10)
  assert mechanism.epsilon(1e-5) <= 1.0
  assert dataclasses.replace(mechanism, steps=30).epsilon(1e-5) > 1.2
  drawn = mechanism.sampler(KEY, 1000)
  served = []
  for step in range(30):
    with contextlib.suppress(ValueError):
      drawn.indices(step)
      served.append(step)
  assert served == list(range(mechanism.steps))


def test_a_stream_ends_with_its_steps_also_within_a_pass():
  """The second pass is paid for whole, but the plan is the plan."""
  scheme = Stream(4, 10)
  assert Mechanism(scheme, 1.0, 4).event() == Mechanism(scheme, 1.0, 6).event()
  drawn = sampler(scheme, 10, 4)
  assert drawn.indices(3).tolist() == [0, 1, 2, 3]
  with pytest.raises(ValueError, match="step is 4, beyond the 4 planned"):
    drawn.indices(4)
