"""Plans: each row meets the target at its own noise, and larger batches have less noise each."""

import pytest

from dp_jax.privacy.calibration.planning import default_batch_sizes, plan
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import Poisson
from dp_jax.privacy.spec import PrivacySpec

SPEC = PrivacySpec(2.0, 1e-5, accountant="rdp")


@pytest.fixture(scope="module")
def rows():
  return list(plan(SPEC, 10_000, 5 * 10_000, [100, 1000, 10_000]))


def test_each_row_meets_the_target_with_its_own_steps(rows):
  assert [row.steps for row in rows] == [500, 50, 5]
  for row in rows:
    rate = row.expected_batch_size / 10_000
    mechanism = Mechanism(Poisson(rate), row.noise_multiplier, row.steps, accountant="rdp")
    epsilon = mechanism.epsilon(1e-5)
    assert 2.0 * (1 - 1e-3) <= epsilon <= 2.0
    assert epsilon == row.epsilon
    assert row.noise_per_unit == row.noise_multiplier / row.expected_batch_size


def test_large_batches_have_more_noise_and_less_of_it_for_each_unit(rows):
  assert [row.noise_multiplier for row in rows] == sorted(row.noise_multiplier for row in rows)
  per_unit = [row.noise_per_unit for row in rows]
  assert per_unit == sorted(per_unit, reverse=True)


def test_default_batches_reach_from_small_to_the_whole():
  assert default_batch_sizes(1437, 1e9) == [64, 128, 256, 512, 1024, 1437]
  assert default_batch_sizes(10, 1e9) == [10]
  assert default_batch_sizes(2**20, 2**30)[-1] == 2**20
  assert max(default_batch_sizes(10**6, 5000)) == 5000


@pytest.mark.parametrize(
  ("num_units", "budget", "sizes"), [(0, 10, None), (100, 0, None), (100, 1000, [101]), (9, 9, [0])]
)
def test_bad_input_is_refused(num_units, budget, sizes):
  with pytest.raises(ValueError):
    list(plan(SPEC, num_units, budget, sizes))
