"""Properties that hold for any parameters; few examples, small settings."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from dp_jax.privacy import FullBatch, Mechanism, Poisson, PrivacySpec, TruncatedPoisson, calibrate
from dp_jax.privacy.accounting.composition import PlannedRelease, account_releases

few = hypothesis.settings(max_examples=5, deadline=None, derandomize=True, database=None)

accountants = st.sampled_from(["pld", "rdp"])
noises = st.floats(3.0, 8.0)
rates = st.floats(0.002, 0.5)
steps = st.integers(1, 200)
deltas = st.floats(1e-8, 1e-3)


def epsilon(rate, noise_multiplier, count, delta, accountant):
  return Mechanism(Poisson(rate), noise_multiplier, count, accountant=accountant).epsilon(delta)


# The rounding of a loss distribution moves epsilon by less than this.
SLACK = 1e-4


@few
@hypothesis.given(rates, noises, steps, deltas, accountants, st.floats(1.05, 3.0))
def test_epsilon_falls_with_noise(rate, noise, count, delta, accountant, factor):
  less = epsilon(rate, noise, count, delta, accountant)
  assert epsilon(rate, factor * noise, count, delta, accountant) <= less * (1 + SLACK)


@few
@hypothesis.given(rates, noises, steps, deltas, accountants, st.integers(1, 400))
def test_epsilon_rises_with_steps(rate, noise, count, delta, accountant, more):
  fewer = epsilon(rate, noise, count, delta, accountant)
  assert epsilon(rate, noise, count + more, delta, accountant) >= fewer * (1 - SLACK)


@few
@hypothesis.given(rates, noises, steps, deltas, accountants, st.floats(1.05, 2.0))
def test_epsilon_rises_with_rate(rate, noise, count, delta, accountant, factor):
  lower = epsilon(rate, noise, count, delta, accountant)
  assert epsilon(factor * rate, noise, count, delta, accountant) >= lower * (1 - SLACK)


@few
@hypothesis.given(rates, noises, steps, deltas, st.floats(1.1, 10.0))
def test_epsilon_falls_with_delta(rate, noise, count, delta, factor):
  smaller = epsilon(rate, noise, count, delta, "pld")
  assert epsilon(rate, noise, count, min(0.5, factor * delta), "pld") <= smaller * (1 + SLACK)


@few
@hypothesis.given(rates, noises, steps, deltas)
def test_pld_is_never_looser_than_rdp(rate, noise, count, delta):
  tight = epsilon(rate, noise, count, delta, "pld")
  assert 0 <= tight <= epsilon(rate, noise, count, delta, "rdp") * (1 + SLACK) + SLACK


@few
@hypothesis.given(st.floats(0.2, 3.0), deltas, rates, steps, accountants)
def test_calibrated_then_recomputed_never_exceeds_the_target(
  target, delta, rate, count, accountant
):
  spec = PrivacySpec(target, delta, accountant=accountant)
  try:
    found = calibrate(spec, Poisson(rate), count)
  except ValueError as error:
    # So little sampling that delta nearly covers it: the search has to say why not.
    assert "cannot be used up" in str(error) or "no noise is needed" in str(error)
    return
  assert target * (1 - 1e-3) <= found.epsilon(delta) <= target


@few
@hypothesis.given(st.floats(0.05, 8.0), st.floats(1e-12, 0.1), st.integers(1, 10_000))
def test_full_batch_calibration(target, delta, count):
  spec = PrivacySpec(target, delta)
  found = calibrate(spec, FullBatch(), count)
  assert target * (1 - 1e-3) <= found.epsilon(delta) <= target


@few
@hypothesis.given(
  st.floats(0.01, 0.2), st.floats(2.5, 6.0), st.integers(1, 100), st.integers(0, 20)
)
def test_truncation_never_helps(rate, noise, count, spare):
  cap = math.ceil(200 * rate) + spare
  plain = epsilon(rate, noise, count, 1e-5, "pld")
  cut = Mechanism(TruncatedPoisson(rate, cap, 200), noise, count + 1)
  # One step fewer than planned, so that a cap over the cliff is not refused.
  assert cut.account(1e-5, steps=count).epsilon >= plain * (1 - SLACK)


@few
@hypothesis.given(rates, noises, steps, st.integers(1, 400))
def test_composing_two_halves_is_composing_the_whole(rate, noise, first, second):
  halves = [PlannedRelease(Mechanism(Poisson(rate), noise, each)) for each in (first, second)]
  whole = epsilon(rate, noise, first + second, 1e-5, "pld")
  assert account_releases(halves, 1e-5).epsilon == pytest.approx(whole, rel=1e-9)
