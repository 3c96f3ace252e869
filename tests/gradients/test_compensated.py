"""Sums as pairs: exact where a float32 is not, and the same under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dp_jax.gradients import compensated as pairs


def _exact(pair: pairs.Compensated) -> np.ndarray:
  return np.asarray(pair.sum["w"], np.float64) + np.asarray(pair.error["w"], np.float64)


def test_two_sum_is_exact_under_jit():
  rng = np.random.default_rng(0)
  a = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 8, 4096)).astype(np.float32)
  b = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 8, 4096)).astype(np.float32)
  total, dropped = (np.asarray(x, np.longdouble) for x in jax.jit(pairs.two_sum)(a, b))
  assert (total + dropped == a.astype(np.longdouble) + b.astype(np.longdouble)).all()
  assert (dropped != 0).any()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100, 1000])
def test_sum_units_agrees_with_float64(count):
  x = np.random.default_rng(count).standard_normal((count, 5)).astype(np.float32)
  got = _exact(jax.jit(pairs.sum_units)({"w": x}))
  np.testing.assert_allclose(got, x.astype(np.float64).sum(0), rtol=0, atol=1e-6 * count**0.5)


def test_a_small_unit_survives_among_large_ones():
  """2^24 + 1 is not a float32; the pair keeps the 1 through 4,096 additions of 2^24."""
  total = pairs.zeros_like({"w": jnp.zeros(1)})
  add = jax.jit(pairs.add)
  big = pairs.Compensated({"w": jnp.full(1, 2.0**24)}, {"w": jnp.zeros(1)})
  one = pairs.Compensated({"w": jnp.ones(1)}, {"w": jnp.zeros(1)})
  for _ in range(64):
    total = add(add(total, big), one)
  assert _exact(total)[0] == 64 * (2**24 + 1)
  plain = np.float32(0)
  for _ in range(64):
    plain = np.float32(np.float32(plain + np.float32(2**24)) + np.float32(1))
  assert float(plain) != 64 * (2**24 + 1)


def test_collapse_rounds_once():
  pair = pairs.Compensated({"w": jnp.float32(1.0)}, {"w": jnp.float32(2.0**-25)})
  assert pairs.collapse(pair)["w"] == 1.0


def test_removing_a_unit_moves_the_sum_by_that_unit_and_no_more():
  """Removal moves every later unit to another place; sums of plain groups of 16 move by 1.01 C."""
  x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
  x = np.tile(x / np.linalg.norm(x, axis=1, keepdims=True), (4096, 1))
  total = jax.jit(pairs.sum_units)

  def moved(sum_units):
    return np.linalg.norm(sum_units(x) - sum_units(x[1:]))

  def plain_groups(x):  # the broken variant
    x = np.pad(x, ((0, -len(x) % 16), (0, 0))).reshape(-1, 16, x.shape[1])
    groups = np.zeros((len(x), x.shape[2]), np.float32)
    for i in range(16):
      groups += x[:, i]
    return groups.astype(np.float64).sum(0)

  assert abs(moved(lambda x: _exact(total({"w": x}))) - 1) < 1e-6
  assert abs(moved(plain_groups) - 1) > 1e-4
