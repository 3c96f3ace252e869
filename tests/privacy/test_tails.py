"""What the finite range of the noise costs, and when a mechanism is refused for it."""

import math

import pytest
from scipy import stats

from dp_jax.privacy import (
  GAUSSIAN_Z_MAX,
  FullBatch,
  Mechanism,
  Poisson,
  SamplerTailError,
  Stream,
  tail_delta,
)
from dp_jax.privacy.accounting import tails


def test_residual_is_a_union_bound_over_steps():
  one = stats.norm.sf(GAUSSIAN_Z_MAX - 1 / 0.5)
  assert tail_delta(0.5, 1) == exactly(one)
  assert tail_delta(0.5, 1000) == exactly(1000 * one)
  assert tail_delta(0.5, 1000, sampling_rate=0.01) == exactly(10 * one)
  assert tail_delta(1.0, 1, sensitivity_factor=2.0) == exactly(one)


def test_residual_of_little_noise_is_capped():
  assert tail_delta(1e-3, 10) == 1.0
  assert tail_delta(0.0, 10) == 1.0


def test_a_float32_normal_would_cost_a_hundred_times_delta(monkeypatch):
  # The full-batch, single-step setting at epsilon 10 and delta 1e-6, where a sampler that ends at
  # 5.42 gives a true delta of at least 1.8e-4 (it ends at 5.22 on one side).
  mechanism = Mechanism(FullBatch(), 0.54109, 1)
  assert mechanism.epsilon(1e-6) == pytest.approx(10.0, rel=1e-4)
  monkeypatch.setattr(tails, "GAUSSIAN_Z_MAX", 5.42)
  assert mechanism.tail_delta() > 1.7e-4
  with pytest.raises(SamplerTailError, match=r"noise_multiplier 0\.54109 is too small"):
    mechanism.epsilon(1e-6)


def test_what_the_accountant_may_spend():
  assert tails.usable_delta(1e-5, 1e-8, 1.0) < 1e-5 - 1e-8 * (1 - 1e-9)
  assert tails.usable_delta(1e-5, 1e-8, 1.0) == pytest.approx(1e-5 - 1e-8)
  with pytest.raises(SamplerTailError, match="more than delta/100"):
    tails.usable_delta(1e-5, 1.01e-7, 1.0)


def test_epsilon_is_taken_at_delta_less_the_residual(monkeypatch):
  mechanism = Mechanism(FullBatch(), 2.0, 1)
  before = mechanism.account(1e-5)
  # A shorter range, whose residual is just below delta/100.
  monkeypatch.setattr(tails, "GAUSSIAN_Z_MAX", 0.5 + stats.norm.isf(0.9e-7))
  after = mechanism.account(1e-5)
  assert after.tail_delta == pytest.approx(0.9e-7, rel=1e-6)
  assert after.delta == before.delta == 1e-5
  assert after.epsilon > before.epsilon
  exact = mechanism.account(1e-5 - after.tail_delta, sampler_tails=False).epsilon
  assert after.epsilon == pytest.approx(exact, rel=1e-9)


def exactly(value):
  """Of values far below the 1e-12 that approx lets pass by itself."""
  return pytest.approx(value, rel=1e-9, abs=0)


def test_a_mechanism_counts_the_steps_that_use_a_unit():
  one = Mechanism(FullBatch(), 0.5, 1).tail_delta()
  assert Mechanism(FullBatch(), 0.5, 10).tail_delta() == exactly(10 * one)
  assert Mechanism(FullBatch(), 0.5, 10).tail_delta(steps=4) == exactly(4 * one)
  assert Mechanism(Poisson(0.1), 0.5, 10).tail_delta() == exactly(one)
  # Ten steps of a tenth each: one pass, one use of each unit.
  assert Mechanism(Stream(10, 100), 0.5, 10).tail_delta() == exactly(one)
  twice = Mechanism(FullBatch(), 1.0, 1, adjacency="replace_one").tail_delta()
  assert twice == exactly(one)


def test_z_max_is_what_76_bits_reach():
  assert 0 < math.sqrt(2 * 76 * math.log(2)) - GAUSSIAN_Z_MAX < 0.02
