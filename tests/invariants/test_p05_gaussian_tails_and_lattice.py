"""P5: the Gaussian has its tails and leaves no lattice; `jax.random.normal` has neither property.

Extremes come from generators that return bits of our choice. The lattice is looked for in one
noised sum of 2^20 coordinates, as whoever sees it would: was the sum exactly zero, or one unit
spread over all coordinates?
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl
from scipy import stats

import dp_jax
from dp_jax.gradients.noise import add_noise, gaussian
from dp_jax.privacy.accounting.tails import GAUSSIAN_Z_MAX

DIM = 2**20
CLIP_NORM = 0.97
# The noise of one full-batch step at epsilon 10 and delta 1e-6, as a multiple of the clip norm.
SMALL_NOISE, PROMISED_DELTA = 0.54109, 1e-6
# Under 2,000 comparisons, each beyond 7.5 deviations with probability 7e-14 in the normal limit.
THRESHOLD = 7.5


def _generator(random_bits):
  """A generator of jax whose bits are `random_bits(word of the key, shape)`."""
  return define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros(1, jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
    random_bits=lambda key, width, shape: random_bits(key[0], shape),
    fold_in=lambda key, data: key,
  )


CONSTANT = _generator(jnp.broadcast_to)
EVERY_UNIFORM = _generator(lambda word, shape: jnp.arange(shape[0], dtype=jnp.uint32) << 9)


def _extremes(draw):
  """What a sampler returns for words of zeros and of ones: its largest magnitude."""
  keys = [jax.random.wrap_key_data(jnp.asarray([w], jnp.uint32), impl=CONSTANT)
          for w in (0, 2**32 - 1)]  # fmt: skip
  return max(float(jnp.max(jnp.abs(draw(key, (4,))))) for key in keys)


def _impossible_for_the_neighbour(largest):
  """The probability of outcomes that data without one unit cannot give: it all goes into delta."""
  return stats.norm.sf(largest - 1 / SMALL_NOISE)


def _our_draw(key, shape):
  return sum(gaussian.standard_normal(key, shape))


def test_the_tails_reach_as_far_as_calibration_assumes():
  largest = _extremes(_our_draw)
  assert largest >= GAUSSIAN_Z_MAX
  assert _impossible_for_the_neighbour(largest) < PROMISED_DELTA / 1e9


def test_the_tails_of_jax_random_normal_break_the_promise_a_hundredfold():
  largest = _extremes(jax.random.normal)
  np.testing.assert_allclose(largest, 5.42, atol=0.01)
  every = jax.random.normal(_every_key(), (2**23,))
  assert float(jnp.max(jnp.abs(every))) == largest
  assert _impossible_for_the_neighbour(largest) > 100 * PROMISED_DELTA


def _every_key():
  return jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=EVERY_UNIFORM)


def test_the_body_is_normal_and_a_scale_that_is_1_percent_wrong_is_rejected():
  """Kolmogorov-Smirnov on 4 million noised zeros; false alarm below 1e-6."""
  zeros = jnp.zeros((4, DIM))
  noised = jax.jit(lambda key: dp_jax.add_noise(zeros, 0.7, key))(jax.random.key(5))
  draws = np.sort(np.asarray(noised, np.float64).ravel()) / 0.7
  assert stats.kstest(draws, "norm").pvalue > 1e-6
  for scale in (0.99, 1.01):
    assert stats.kstest(scale * draws, "norm").pvalue < 1e-6


def _low_bits(noised, stddev):
  """(exponent, place of the lowest bit that is set) of each coordinate but the zeros."""
  x = np.asarray(noised, np.float64) / 2.0 ** np.floor(np.log2(stddev))
  mantissa, exponent = np.frexp(x[x != 0])
  whole = np.abs(np.ldexp(mantissa, 24)).astype(np.int64)
  return exponent, exponent - 24 + np.log2(whole & -whole).astype(np.int64)


def _lattice(first, second, stddev):
  """How far apart two noised sums are by their residues modulo powers of two, in deviations.

  Among the coordinates below 2^e, the share that is a multiple of 2^g; for each e and g the two
  shares are compared. A float32 near zero has bits far below those of a sum of larger ones: where
  such bits are set, nothing was added.
  """
  largest = 0.0
  (exponents, bits), (other_exponents, other_bits) = (_low_bits(x, stddev) for x in (first, second))
  for e in range(-20, 2):
    a, b = bits[exponents <= e], other_bits[other_exponents <= e]
    grids = np.arange(-48, -8)
    counts = [len(x) - np.searchsorted(np.sort(x), grids) for x in (a, b)]
    n, m = len(a), len(b)
    if min(n, m) < 200:
      continue
    pooled = (counts[0] + counts[1]) / (n + m)
    usable = np.minimum(pooled, 1 - pooled) * min(n, m) > 20  # where the normal limit holds
    spread = np.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))[usable]
    if spread.size:
      largest = max(largest, np.max(np.abs(counts[0] / n - counts[1] / m)[usable] / spread))
  return largest


def _sums():
  """The un-noised sums that must look alike: zero, and one unit spread over all coordinates."""
  entry = np.float32(CLIP_NORM * (1 - 2**-10) / np.sqrt(DIM))
  signs = np.sign(np.random.default_rng(0).standard_normal(DIM)).astype(np.float32)
  zero = np.zeros(DIM, np.float32)
  return {"zero": zero, "even": zero + entry, "signs": entry * signs}


def _distances(add, stddev):
  sums = _sums()
  noised = {
    name: np.asarray(add(total, stddev, jax.random.key(i))) for i, (name, total) in
    enumerate(sums.items())
  }  # fmt: skip
  return [_lattice(noised["zero"], noised[name], stddev) for name in ("even", "signs")]


def _add_noise(total, stddev, key):
  return dp_jax.add_noise(jnp.asarray(total), stddev, key)


def _add_normal(total, stddev, key):
  return total + np.float32(stddev) * np.asarray(jax.random.normal(key, total.shape))


def _without_rounding(total, error, stddev, key):
  """The draw as one float32, added as it is."""
  high, _ = gaussian.standard_normal(key, total.shape)
  return np.asarray(total) + np.float32(stddev) * np.asarray(high)


@pytest.mark.parametrize("stddev", [SMALL_NOISE * CLIP_NORM, 1.0, 1.7])
def test_no_lattice_shows_whether_the_sum_was_zero(stddev):
  assert max(_distances(_add_noise, stddev)) < THRESHOLD


@pytest.mark.parametrize("stddev", [SMALL_NOISE * CLIP_NORM, 1.0])
def test_without_the_rounding_the_same_draw_shows_it(monkeypatch, stddev):
  monkeypatch.setattr(add_noise, "_noised_leaf", _without_rounding)
  assert min(_distances(_add_noise, stddev)) > 2 * THRESHOLD


@pytest.mark.parametrize("stddev", [SMALL_NOISE * CLIP_NORM, 1.0])
def test_jax_random_normal_shows_it(stddev):
  assert min(_distances(_add_normal, stddev)) > 2 * THRESHOLD


@functools.cache
def _support():
  """Every value that `jax.random.normal` can return in float32."""
  return np.unique(np.asarray(jax.random.normal(_every_key(), (2**23,))))


def _log_likelihood_ratio(noised, rounded):
  """For "the sum was zero" against "not": minus infinity once a value is out of reach of zero."""
  support = np.unique(rounded(_support()))
  return 0.0 if np.isin(noised, support).all() else -np.inf


@pytest.mark.parametrize("grid", [None, 2.0**-14])
def test_the_support_of_jax_random_normal_decides_even_after_rounding(grid):
  """Its lattice is coarse in the tails: spaced 9e-4 at four deviations, beyond any usable grid."""

  def rounded(x):
    return x if grid is None else np.round(x / np.float32(grid)) * np.float32(grid)

  for name, total in _sums().items():
    noised = rounded(_add_normal(total, 1.0, jax.random.key(1)))
    expected = 0.0 if name == "zero" else -np.inf
    assert _log_likelihood_ratio(noised, rounded) == expected
