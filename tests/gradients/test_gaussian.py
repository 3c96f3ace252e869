"""The sampler: its extremes by extreme bits, its body by statistics, its exact rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise import add_noise, gaussian
from dp_jax.gradients.noise.leaf_keys import leaf_keys
from dp_jax.privacy.accounting.tails import GAUSSIAN_Z_MAX

ONES = 2**32 - 1


def _draw(words):
  high, low = gaussian.from_bits(*(jnp.asarray([w], jnp.uint32) for w in words))
  return np.asarray(high, np.float64)[:, 0] + np.asarray(low, np.float64)[:, 0]


def test_extreme_bits_reach_the_tails_that_calibration_assumes():
  largest = _draw((0, 0, 0, 0))[0]
  assert largest >= GAUSSIAN_Z_MAX > 10.2
  np.testing.assert_allclose(largest, np.sqrt(2 * 77 * np.log(2)), rtol=1e-6)
  smallest = np.abs(_draw((ONES, ONES, 0, ONES))).max()
  assert 0 < smallest < 1e-10


@pytest.mark.parametrize("radius", [0, 1, 2**31 - 1, 2**31, ONES - 1, ONES])
def test_radius_is_accurate_on_both_sides(radius):
  words = jnp.uint32(radius), jnp.uint32(12345), jnp.uint32(77)
  got = np.asarray(gaussian._radius(*words), np.float64)
  u = (np.longdouble(radius) * 2**44 + 12345 * 2**12 + np.longdouble(77.5)) / 2.0**76
  np.testing.assert_allclose(got, float(np.sqrt(-2 * np.log(u))), rtol=1e-6)


def test_the_eight_parts_of_the_circle_are_used():
  words = (np.arange(8, dtype=np.uint32) << 29) + np.uint32(2**27)
  cosine, sine = gaussian._circle(jnp.asarray(words), jnp.zeros(8, jnp.uint32))
  angles = np.sort(np.degrees(np.arctan2(sine, cosine)))
  np.testing.assert_allclose(np.diff(angles).sum(), 360 - 2 * 11.25, atol=1e-3)
  assert len(np.unique(np.round(angles, 3))) == 8


def test_sine_and_cosine_are_within_their_stated_error():
  angles = np.linspace(0, np.pi / 4, 2**20).astype(np.float32)
  got = jax.jit(gaussian._cosine_and_sine)(angles)
  for values, exact_of in zip(got, (np.cos, np.sin), strict=True):
    exact = exact_of(angles.astype(np.longdouble))
    error = np.abs(np.asarray(values, np.longdouble) - exact)
    assert (error <= 1.1 * np.spacing(exact.astype(np.float32))).all()


def test_words_are_whole_blocks_of_the_generator():
  """Together they are what `jax.random.bits` gives; apart they are different words."""
  key = jax.random.key(2)
  first, second = gaussian._two_words(key, (4096,))
  assert (first ^ second == jax.random.bits(key, (4096,), jnp.uint32)).all()
  bits = np.unpackbits(np.stack([first, second]).view(np.uint8), axis=1).astype(float)
  assert abs(np.corrcoef(bits)[0, 1]) < 5 / np.sqrt(bits.shape[1])


def test_other_generators_serve_too():
  high, _ = gaussian.standard_normal(jax.random.key(0, impl="rbg"), (2**18,))
  assert stats.kstest(np.asarray(high, np.float64), "norm").pvalue > 1e-6


def test_body_is_normal_and_the_test_would_see_a_wrong_scale():
  """Kolmogorov-Smirnov on 4 million draws; false alarm below 1e-6 (and the seed is fixed)."""
  high, low = jax.jit(gaussian.standard_normal, static_argnums=1)(jax.random.key(7), (2000, 2001))
  draws = np.asarray(high, np.float64).ravel() + np.asarray(low, np.float64).ravel()
  assert stats.kstest(draws, "norm").pvalue > 1e-6
  assert stats.kstest(1.01 * draws, "norm").pvalue < 1e-6
  assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / np.sqrt(draws.size)


def test_odd_and_empty_shapes():
  for shape in [(), (1,), (3,), (2, 5), (0,), (4, 0)]:
    high, low = gaussian.standard_normal(jax.random.key(0), shape)
    assert high.shape == low.shape == shape


@pytest.mark.parametrize("stddev", [1e-6, 0.3, 0.5, 1.0, 7.7])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 2.0**30])
def test_noise_is_added_and_rounded_exactly(stddev, magnitude):
  """The same draw in extended precision, rounded once, gives the same float32."""
  rng = np.random.default_rng(1)
  exact = (rng.standard_normal(3000) * magnitude * stddev).astype(np.longdouble)
  total = exact.astype(np.float32)
  error = (exact - total).astype(np.float32)
  key = jax.random.key(5)
  pair = Compensated({"w": jnp.asarray(total)}, {"w": jnp.asarray(error)})
  got = np.asarray(jax.jit(lambda t, k: add_noise.add_noise(t, stddev, k))(pair, key)["w"])
  high, low = gaussian.standard_normal(leaf_keys(pair.sum, key)[0], (3000,))
  exponent = int(np.floor(np.log2(stddev))) - 14
  grid = np.longdouble(2) ** exponent
  scaled = np.longdouble(np.nextafter(np.float32(np.ldexp(stddev, -exponent)), np.float32(np.inf)))
  z = np.asarray(high, np.longdouble) + np.asarray(low, np.longdouble)
  expected = np.rint((total.astype(np.longdouble) + error) / grid + z * scaled) * grid
  # One in 2^20 sums lies so near a half that the rounding of its fraction decides.
  assert np.mean(got != expected.astype(np.float32)) <= 1e-3
  assert (np.abs(got - expected) <= np.maximum(grid, np.abs(expected) * 2.0**-23)).all()


def test_values_do_not_depend_on_the_sharding():
  mesh = jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Auto,))
  total = {"a": jnp.zeros((16, 24)), "b": jnp.zeros((8, 3))}
  key = jax.random.key(3)
  plain = jax.jit(lambda t, k: add_noise.add_noise(t, 1.0, k))(total, key)
  for spec in [("d", None), (None, "d")]:
    shardings = {
      "a": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)),
      "b": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")),
    }
    sharded = jax.jit(lambda t, k: add_noise.add_noise(t, 1.0, k), out_shardings=shardings)(
      jax.device_put(total, shardings), key
    )
    assert all((np.asarray(plain[n]) == np.asarray(sharded[n])).all() for n in total)


def test_refuses_bad_arguments():
  key = jax.random.key(0)
  for stddev in (0.0, -1.0, float("nan"), float("inf"), 1e30, jnp.float32(1.0)):
    with pytest.raises(ValueError, match="stddev"):
      add_noise.add_noise({"w": jnp.zeros(2)}, stddev, key)
  with pytest.raises(ValueError, match="typed key"):
    add_noise.add_noise({"w": jnp.zeros(2)}, 1.0, jnp.zeros(2, jnp.uint32))
  with pytest.raises(ValueError, match="single key"):
    add_noise.add_noise({"w": jnp.zeros(2)}, 1.0, jax.random.split(key, 2))


def test_the_sign_of_a_zero_does_not_show():
  """-0.0 would say that sum and noise were both tiny and negative; `==` cannot see it."""
  shape = (2**20,)
  total = Compensated(
    {"w": jnp.full(shape, -1e-9, jnp.float32)}, {"w": jnp.full(shape, -1e-17, jnp.float32)}
  )
  noised = jax.jit(lambda t, k: add_noise.add_noise(t, 1.0, k))(total, jax.random.key(0))["w"]
  zeros = np.asarray(noised)[np.asarray(noised) == 0]
  assert len(zeros) > 5 and not np.signbit(zeros).any()
