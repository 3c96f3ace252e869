"""What the samplers draw. Statistical tests state how often they fail by chance."""

import math

import numpy as np
import pytest
from scipy import stats

from dp_jax.privacy import FixedSize, FullBatch, MasterKey, Mechanism, Poisson, Stream
from dp_jax.privacy import TruncatedPoisson as Truncated
from dp_jax.privacy.sampling.draws import exponentials, poisson_indices, step_generator
from dp_jax.privacy.sampling.sampler import make_sampler

KEY = MasterKey(bytes(range(32)))
OTHER = MasterKey(bytes(32))
# Each statistic below is compared at 5.33 standard errors: 1e-7 of false alarms, two-sided.
Z = 5.33


def sampler(sampling, num_units, key=KEY, steps=20_000):
  adjacency = "replace_one" if sampling.name == "fixed_size" else "zero_out"
  return Mechanism(sampling, 1.0, steps, adjacency=adjacency).sampler(key, num_units)


SCHEMES = [
  (FullBatch(), 50),
  (Poisson(0.1), 50),
  (Poisson(1.0), 50),
  (Truncated(0.4, 21, 50), 50),
  (FixedSize(7, 50), 50),
  (Stream(7, 50), 50),
]


@pytest.mark.parametrize(("sampling", "num_units"), SCHEMES)
def test_indices_are_sorted_distinct_and_in_range(sampling, num_units):
  drawn = sampler(sampling, num_units)
  for step in range(50):
    indices = drawn.indices(step)
    assert indices.dtype == np.int64
    assert np.all(np.diff(indices) > 0)
    assert indices.size == 0 or (indices[0] >= 0 and indices[-1] < num_units)


@pytest.mark.parametrize(("sampling", "num_units"), SCHEMES)
def test_indices_are_a_function_of_key_and_step(sampling, num_units):
  first, second = sampler(sampling, num_units), sampler(sampling, num_units)
  backwards = [first.indices(step) for step in reversed(range(20))][::-1]
  for step in range(20):
    np.testing.assert_array_equal(backwards[step], second.indices(step))


@pytest.mark.parametrize(
  "sampling", [Poisson(0.5), Truncated(0.5, 500, 1000), FixedSize(500, 1000)]
)
def test_keys_and_steps_give_other_indices(sampling):
  here, there = sampler(sampling, 1000), sampler(sampling, 1000, OTHER)
  assert not np.array_equal(here.indices(0), here.indices(1))
  assert not np.array_equal(here.indices(0), there.indices(0))


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.9, 1.0])
def test_poisson_is_prefix_stable(rate):
  longer = sampler(Poisson(rate), 1001)
  shorter = sampler(Poisson(rate), 1000)
  much_shorter = sampler(Poisson(rate), 10)
  for step in range(30):
    indices = longer.indices(step)
    np.testing.assert_array_equal(indices[indices < 1000], shorter.indices(step))
    np.testing.assert_array_equal(indices[indices < 10], much_shorter.indices(step))


def test_blocks_of_skips_join_without_a_seam():
  # 2^20 gaps are drawn at a time; here several such blocks are needed.
  num_units, rate = 4_000_000, 0.6
  indices = poisson_indices(step_generator(KEY, "sampling", 0), num_units, rate)
  assert np.all(np.diff(indices) > 0) and indices[-1] < num_units
  deviation = math.sqrt(num_units * rate * (1 - rate))
  assert abs(indices.size - num_units * rate) < Z * deviation
  gaps = np.diff(indices)
  assert abs(np.mean(gaps == 1) - rate) < Z * math.sqrt(rate * (1 - rate) / gaps.size)


def test_poisson_statistics_over_a_million_draws():
  # A million batches of N = 50 at rate 0.1, cut from one long draw: gaps are independent, so
  # consecutive stretches of 50 units are independent batches of the same distribution.
  batches, size, rate = 1_000_000, 50, 0.1
  indices = poisson_indices(step_generator(KEY, "sampling", 1), batches * size, rate)
  counts = np.bincount(indices // size, minlength=batches)
  assert abs(counts.mean() - 5) < Z * math.sqrt(4.5 / batches)
  fourth = stats.binom(size, rate).stats("k") + 3
  assert abs(counts.var() - 4.5) < Z * 4.5 * math.sqrt((fourth - 1) / batches)
  empty = 0.9**50
  assert empty == pytest.approx(0.00515, abs=1e-5)
  assert abs(np.mean(counts == 0) - empty) < Z * math.sqrt(empty / batches)
  # Two given units together, in the same batch: rate 0.01.
  used = np.zeros(batches * size, dtype=bool)
  used[indices] = True
  used = used.reshape(batches, size)
  for i, j in ((0, 1), (0, 49), (20, 30)):
    pair = np.mean(used[:, i] & used[:, j])
    assert abs(pair - 0.01) < Z * math.sqrt(0.01 / batches)
  each = used.mean(axis=0)
  # 50 comparisons: 5e-6 of false alarms together would be too many, so a little wider.
  assert np.all(np.abs(each - rate) < 6.0 * math.sqrt(rate * (1 - rate) / batches))


def test_steps_are_independent_draws():
  steps, size, rate = 20_000, 50, 0.1
  drawn = sampler(Poisson(rate), size)
  used = np.zeros((steps, size), dtype=bool)
  for step in range(steps):
    used[step, drawn.indices(step)] = True
  assert abs(used.mean() - rate) < Z * math.sqrt(rate * (1 - rate) / used.size)
  # The same unit in consecutive steps: rate^2, over 50 independent columns.
  both = np.mean(used[1:] & used[:-1])
  assert abs(both - rate**2) < Z * math.sqrt(1.3 * rate**2 / used[1:].size)
  # Batch sizes of consecutive steps do not follow each other.
  counts = used.sum(axis=1) - size * rate
  correlation = np.mean(counts[1:] * counts[:-1]) / 4.5
  assert abs(correlation) < Z / math.sqrt(steps)


def test_low_rates_are_resolved():
  # With 53-bit uniforms, skips at such a rate would be multiples of 122 and start at 122.
  rate = 2.0**-40 * 1.5
  bits = step_generator(KEY, "sampling", 2)
  gaps = np.floor(exponentials(bits, 200_000) / -np.log1p(-rate))
  assert np.unique(gaps % 2).size == 2
  assert abs(np.mean(gaps % 2) - 0.5) < Z * 0.5 / math.sqrt(gaps.size)
  assert abs(gaps.mean() * rate - 1) < Z / math.sqrt(gaps.size)


def test_exponentials_follow_their_distribution():
  drawn = exponentials(step_generator(KEY, "sampling", 3), 200_000)
  assert stats.kstest(drawn, "expon").pvalue > 1e-7
  # ... and the test sees a scale that is 2% wrong.
  assert stats.kstest(1.02 * drawn, "expon").pvalue < 1e-7


def test_exponentials_at_the_extremes():
  class Fixed:
    def random_raw(self, count):
      return np.array([0, 2**64 - 1, 2**63, 2**63 - 1], dtype=np.uint64)[:count]

  drawn = exponentials(Fixed(), 4)
  np.testing.assert_allclose(drawn[0], 65 * math.log(2), rtol=1e-12)
  np.testing.assert_allclose(drawn[1], 2.0**-65, rtol=1e-12)
  np.testing.assert_allclose(drawn[2:], math.log(2), rtol=1e-12)


def test_truncation_keeps_a_uniform_subset():
  steps, size, cap = 20_000, 40, 20
  drawn = sampler(Truncated(0.5, cap, size), size)
  counts = np.zeros(size)
  cut = 0
  for step in range(steps):
    indices = drawn.indices(step)
    assert indices.size <= cap
    cut += indices.size == cap
    counts[indices] += 1
  # Over half of the draws are cut; whichever unit is dropped, all are kept equally often.
  assert cut > steps / 2
  sizes = np.minimum(np.arange(size + 1), cap)
  share = stats.binom.pmf(np.arange(size + 1), size, 0.5) @ sizes / size
  assert share < 0.47
  assert np.all(np.abs(counts / steps - share) < 6 * math.sqrt(share * (1 - share) / steps))


def test_truncation_leaves_smaller_draws_alone():
  plain = sampler(Poisson(0.1), 50)
  cut = sampler(Truncated(0.1, 6, 50), 50)
  sizes = set()
  for step in range(200):
    indices = plain.indices(step)
    kept = cut.indices(step)
    sizes.add(min(indices.size, 7))
    if indices.size <= 6:
      np.testing.assert_array_equal(kept, indices)
    else:
      assert kept.size == 6 and set(kept) < set(indices)
  assert 7 in sizes and 3 in sizes


def test_fixed_size_is_uniform():
  steps, size, chosen = 20_000, 40, 8
  drawn = sampler(FixedSize(chosen, size), size)
  counts = np.zeros(size)
  pairs = 0
  for step in range(steps):
    indices = drawn.indices(step)
    assert indices.size == chosen
    counts[indices] += 1
    pairs += np.isin([3, 30], indices).all()
  share = chosen / size
  assert np.all(np.abs(counts / steps - share) < 6 * math.sqrt(share * (1 - share) / steps))
  pair = share * (chosen - 1) / (size - 1)
  assert abs(pairs / steps - pair) < Z * math.sqrt(pair * (1 - pair) / steps)


def test_full_batch_and_stream():
  np.testing.assert_array_equal(sampler(FullBatch(), 5).indices(3), np.arange(5))
  stream = sampler(Stream(4, 10), 10)
  blocks = [stream.indices(step).tolist() for step in range(5)]
  assert blocks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]
  scheme = Stream(4, 10)
  assert [scheme.releases(steps) for steps in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]


def test_a_stream_uses_no_unit_more_often_than_it_has_epochs():
  scheme = Stream(4, 10)
  stream = sampler(scheme, 10)
  uses = np.zeros(10, dtype=int)
  for step in range(25):
    uses[stream.indices(step)] += 1
    assert uses.max() == scheme.releases(step + 1)


def test_another_number_of_units_than_accounted_is_refused():
  for sampling in (Truncated(0.1, 6, 50), FixedSize(5, 50), Stream(5, 50)):
    with pytest.raises(ValueError, match=r"51 units, but .* accounted for 50"):
      sampler(sampling, 51)


def test_bad_arguments():
  with pytest.raises(ValueError, match="num_units is 0"):
    sampler(FullBatch(), 0)
  with pytest.raises(ValueError, match="step is -1"):
    sampler(FullBatch(), 5).indices(-1)
  with pytest.raises(ValueError, match="no sampler"):
    make_sampler("poisson", KEY, 5, 1)


def test_a_billion_units_need_no_billion_booleans():
  drawn = sampler(Poisson(1e-6), 10**9)
  sizes = [drawn.indices(step).size for step in range(200)]
  assert abs(np.mean(sizes) - 1000) < Z * math.sqrt(1000 / 200)
