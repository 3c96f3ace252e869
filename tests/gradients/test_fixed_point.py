"""Sums across devices are exact, in any order, and lose nothing that a pair holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.fixed_point import FixedPoint, from_fixed, to_fixed

UNIT = 2.0**-40


def _pairs(rng, count, size, dim=512):
  """Normalised pairs of about `size`, and their exact values."""
  total = (size * rng.standard_normal((count, dim))).astype(np.float32)
  error = (np.spacing(total) * rng.uniform(-0.5, 0.5, total.shape)).astype(np.float32)
  return total, error


def _value(pair):
  return np.asarray(pair.sum, np.longdouble) + np.asarray(pair.error, np.longdouble)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e4, 2.0**24, 2.0**28])
@pytest.mark.parametrize("clip_norm", [1.0, 0.97, 1e-12, 1e12])
def test_a_value_comes_back_to_half_a_unit_or_the_last_place_of_a_pair(size, clip_norm):
  rng = np.random.default_rng(0)
  total, error = (np.float32(clip_norm) * x for x in _pairs(rng, 1, size)) if size else (0, 0)
  pair = Compensated(jnp.asarray(total[0]), jnp.asarray(error[0]))
  back = jax.jit(lambda p: from_fixed(to_fixed(p, clip_norm), clip_norm))(pair)
  scale = 2.0 ** np.ceil(np.log2(clip_norm))
  off = np.abs(_value(back) - _value(pair))
  assert (off <= 0.501 * UNIT * scale + 2.0**-47 * np.abs(_value(pair))).all()
  assert np.abs(np.asarray(back.error)).max() <= np.spacing(np.abs(np.asarray(back.sum))).max()


@pytest.mark.parametrize("count", [2, 8, 2048])
def test_sums_are_exact_whatever_their_order(count):
  rng = np.random.default_rng(count)
  total, error = _pairs(rng, count, 1e3)
  fixed = to_fixed(Compensated(jnp.asarray(total), jnp.asarray(error)), 1.0)
  orders = [np.arange(count), rng.permutation(count)]
  sums = [FixedPoint(*(jnp.sum(part[order], axis=0) for part in fixed)) for order in orders]
  first, second = (from_fixed(s, 1.0) for s in sums)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  exact = (total.astype(np.longdouble) + error.astype(np.longdouble)).sum(0)
  assert np.abs(_value(first) - exact).max() <= count * UNIT + 2.0**-46 * np.abs(exact).max()


def test_a_plain_sum_across_devices_is_caught():
  """One unit among a million on eight devices: float32 loses it, fixed point does not."""
  rng = np.random.default_rng(0)
  devices = rng.uniform(1e5, 2e5, (8, 64))

  def moved(combine):
    without = devices.copy()
    without[3, 0] -= 0.7
    return [combine(x) for x in (devices, without)]

  def pair_of(x):
    total = x.astype(np.float32)
    return Compensated(jnp.asarray(total), jnp.asarray((x - total).astype(np.float32)))

  def exact(x):
    fixed = to_fixed(pair_of(x), 1.0)
    return _value(from_fixed(FixedPoint(*(jnp.sum(part, axis=0) for part in fixed)), 1.0))

  def plain(x):
    return np.asarray(jnp.sum(pair_of(x).sum, axis=0), np.float64)

  for combine, tolerance in ((exact, 1e-6), (plain, None)):
    first, second = moved(combine)
    off = np.abs(float(first[0] - second[0]) - 0.7)
    assert off <= tolerance if tolerance else off > 1e-2
