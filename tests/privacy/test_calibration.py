"""Noise, steps and rates from a target: just on its safe side, or a reason why not."""

import dataclasses
import math

import pytest

from dp_jax.privacy import (
  FixedSize,
  FullBatch,
  Mechanism,
  Poisson,
  PrivacySpec,
  Stream,
  TruncatedPoisson,
  calibrate,
  calibrate_rate,
  calibrate_steps,
)
from dp_jax.privacy.accounting import accountants
from dp_jax.privacy.calibration import search


def meets(mechanism, spec, within=1e-3):
  epsilon = mechanism.epsilon(spec.delta)
  return spec.epsilon * (1 - within) <= epsilon <= spec.epsilon


@pytest.mark.parametrize(
  ("spec", "sampling", "expected"),
  [
    (PrivacySpec(1.0, 1e-5), FullBatch(), 3.7306),
    (PrivacySpec(1.0, 1e-5, accountant="rdp"), FullBatch(), 4.045),
    (PrivacySpec(1.0, 1e-5, adjacency="replace_one"), FullBatch(), 7.4612),
    (PrivacySpec(1.0, 1e-5, adjacency="add_or_remove_one"), FullBatch(), 3.7306),
    (PrivacySpec(0.05, 1e-5), FullBatch(), 57.77),
    (PrivacySpec(0.05, 1e-5, accountant="pld"), FullBatch(), 57.77),
  ],
)
def test_one_full_batch_step(spec, sampling, expected):
  found = calibrate(spec, sampling, 1)
  assert found.noise_multiplier == pytest.approx(expected, rel=2e-4)
  assert meets(found, spec)


@pytest.mark.parametrize(
  ("spec", "sampling", "steps"),
  [
    (PrivacySpec(2.0, 1e-5), Poisson(0.01), 1000),
    (PrivacySpec(0.01, 1e-5), Poisson(0.01), 1000),
    (PrivacySpec(12.0, 1e-5), Poisson(0.1), 50),
    (PrivacySpec(0.3, 1e-7, accountant="rdp"), Poisson(0.001), 50_000),
    (PrivacySpec(2.0, 1e-5, adjacency="replace_one"), Poisson(0.02), 100),
    (PrivacySpec(0.1, 1e-5), TruncatedPoisson(0.02, 60, 1000), 5),
    (PrivacySpec(2.0, 1e-5, adjacency="replace_one"), FixedSize(20, 1000), 100),
    (PrivacySpec(2.0, 1e-5), Stream(20, 1000), 120),
    (PrivacySpec(2.0, 1e-5, adjacency="replace_one"), Stream(20, 1000), 120),
    (PrivacySpec(3.0, 1e-12), FullBatch(), 5),
    (PrivacySpec(0.5, 0.3), Poisson(0.5), 100),
  ],
)
def test_noise_meets_the_target(spec, sampling, steps):
  found = calibrate(spec, sampling, steps, clip_norm=0.25)
  assert meets(found, spec)
  assert (found.steps, found.clip_norm, found.adjacency) == (steps, 0.25, spec.adjacency)
  assert found.stddev == 0.25 * found.noise_multiplier


def test_a_stream_gets_no_amplification():
  # What shuffled batches are worth: a full release a pass, as if each step used everything once.
  spec = PrivacySpec(2.0, 1e-5)
  sampled = dataclasses.replace(spec, accountant="rdp")  # quicker, and asks for more noise
  stream = calibrate(spec, Stream(10, 1000), 100)
  assert stream.noise_multiplier == pytest.approx(calibrate(spec, FullBatch(), 1).noise_multiplier)
  assert stream.noise_multiplier > 2 * calibrate(sampled, Poisson(0.01), 100).noise_multiplier


def test_calibrating_twice_gives_the_same_bits():
  spec = PrivacySpec(1.5, 1e-5)
  assert calibrate(spec, Poisson(0.1), 50) == calibrate(spec, Poisson(0.1), 50)


@pytest.mark.parametrize(
  ("spec", "sampling", "noise_multiplier"),
  [
    (PrivacySpec(2.0, 1e-5), Poisson(0.05), 3.0),
    (PrivacySpec(2.0, 1e-5, adjacency="replace_one"), FixedSize(10, 1000), 2.0),
    (PrivacySpec(2.0, 1e-5), FullBatch(), 10.0),
    (PrivacySpec(2.0, 1e-5), Stream(10, 1000), 5.0),
  ],
)
def test_steps_are_the_most_that_fit(spec, sampling, noise_multiplier):
  found = calibrate_steps(spec, sampling, noise_multiplier)
  assert found.noise_multiplier == noise_multiplier
  assert found.epsilon(spec.delta) <= spec.epsilon
  per_pass = sampling.steps_per_release
  more = dataclasses.replace(found, steps=found.steps + per_pass)
  assert more.epsilon(spec.delta) > spec.epsilon


def test_rate_is_the_largest_that_fits():
  spec = PrivacySpec(2.0, 1e-5)
  found = calibrate_rate(spec, 200, 1.0)
  assert meets(found, spec)
  assert 0.01 < found.sampling.rate < 0.1
  more = dataclasses.replace(found, sampling=Poisson(found.sampling.rate * 1.0001))
  assert more.epsilon(spec.delta) > spec.epsilon


def test_rate_one_if_even_that_fits():
  found = calibrate_rate(PrivacySpec(20.0, 1e-5), 10, 10.0)
  assert found.sampling.rate == 1.0


def test_a_target_that_one_step_overspends():
  one = Mechanism(Poisson(0.1), 1.5, 1).epsilon(1e-5)
  with pytest.raises(ValueError, match=rf"1 steps spend {one:.6g};"):
    calibrate_steps(PrivacySpec(0.02, 1e-5), Poisson(0.1), 1.5)


def test_a_target_beyond_the_samplers_range():
  with pytest.raises(ValueError, match="cannot be used up") as error:
    calibrate(PrivacySpec(5000.0, 1e-5), FullBatch(), 1)
  named = float(str(error.value).split("it spends ")[1].split(";")[0])
  # The epsilon that the message names can be had.
  spec = PrivacySpec(named * 0.9999, 1e-5)
  assert meets(calibrate(spec, FullBatch(), 1), spec)


def test_a_delta_that_no_accountant_resolves():
  with pytest.raises(ValueError, match=r"cannot be met.*RDP has no such event"):
    calibrate(PrivacySpec(1.0, 1e-18, adjacency="replace_one"), Poisson(0.01), 10)


def test_a_delta_so_large_that_no_noise_is_needed():
  # A unit is used at all with probability 0.096, less than delta.
  with pytest.raises(ValueError, match=r"0\.0956, which is less than delta"):
    calibrate(PrivacySpec(1.0, 0.5), Poisson(0.01), 10)


def test_search_ends_on_the_safe_side():
  calls = []

  def falling(at):
    calls.append(at)
    return -3 * at + math.sin(at) / 2

  found = search.meet(falling, falling, 5.0, (-50.0, 50.0))
  assert -2e-5 <= falling(found) <= 0
  assert len(calls) < 15


@pytest.mark.parametrize("start", [-9.0, 0.0, 9.0])
def test_search_with_infinite_ends(start):
  def value(at):
    return math.inf if at < -2 else -math.inf if at > 3 else -0.1 * at**3 - 0.05

  found = search.meet(value, value, start, (-10.0, 10.0))
  assert -2e-5 <= value(found) <= 0


def test_search_where_the_rough_function_misleads():
  found = search.meet(lambda at: 5 - at, lambda at: 1 - at, 0.0, (-50.0, 50.0))
  assert found == pytest.approx(1.0, abs=2e-5) and found >= 1.0


def jump(at):
  return 1.0 if at < 2 else -1.0


def test_search_over_a_jump_says_so_and_names_its_safe_side():
  with pytest.raises(search.SearchError) as error:
    search.meet(jump, jump, 0.0, (-9.0, 9.0))
  assert error.value.jump
  assert 2 <= error.value.nearest.at < 2 + 1e-6


def test_search_over_a_jump_between_few_points_takes_the_safe_side():
  def whole(low, high, at):
    least = -9 if math.isinf(low) else low + 1
    most = 9 if math.isinf(high) else high - 1
    return float(min(max(round(at), least), most)) if least <= most else None

  assert search.meet(jump, jump, 0.0, (-9.0, 9.0), whole) == 2.0


def test_search_over_a_far_jump_between_whole_numbers_finds_it():
  """A line through points on either side of a jump lands outside of them, at one end or the other.

  Where it was then moved by one, the search crept along both ends until it gave up, far from the
  answer.
  """
  calls = []

  def value(at):
    steps = round(math.exp(-at))
    calls.append(steps)
    return 6.0 + 1e-9 * steps if steps > 123_456 else -0.2 + 1e-9 * steps

  def whole(low, high, at):
    most = 10**7 if math.isinf(low) else round(math.exp(-low)) - 1
    least = 1 if math.isinf(high) else round(math.exp(-high)) + 1
    return -math.log(min(max(round(math.exp(-at)), least), most)) if least <= most else None

  found = search.meet(value, value, -math.log(100), (-math.log(10**7), 0.0), whole)
  assert round(math.exp(-found)) == 123_456
  assert len(calls) < 80


def test_a_target_that_the_accountants_figure_jumps_over(monkeypatch):
  real = accountants.account_parts

  def jumping(*args):
    found = real(*args)
    return found if found.epsilon > 1 else dataclasses.replace(found, epsilon=0.9 * found.epsilon)

  monkeypatch.setattr(accountants, "account_parts", jumping)
  with pytest.raises(ValueError, match="jumps over it from"):
    calibrate(PrivacySpec(0.95, 1e-5), FullBatch(), 1)


def test_steps_are_bounded_in_number_and_in_time():
  # At 10^9 steps each look at a loss distribution took seconds, and the search a minute.
  spec = PrivacySpec(50.0, 1e-3, adjacency="replace_one")
  with pytest.raises(ValueError, match="10000000 steps spend"):
    calibrate_steps(spec, Poisson(2.7e-4), 9.3)


def test_the_last_of_millions_of_steps_is_not_looked_for():
  spec = PrivacySpec(3.0, 1e-5)
  found = calibrate_steps(spec, FullBatch(), 3000.0)
  assert found.steps > 10**6 and meets(found, spec)


@pytest.mark.parametrize("offset", [100.0, -100.0])
def test_search_without_an_answer(offset):
  with pytest.raises(search.SearchError) as error:
    search.meet(lambda at: offset - at, lambda at: offset - at, 0.0, (-9.0, 9.0))
  assert error.value.nearest.at == math.copysign(9.0, offset)
