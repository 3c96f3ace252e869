"""Schedules, optimizers and the moving average, against values by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dp_jax.gradients.optimizers import make_optimizer, make_schedule, update_average


def test_constant_schedule_with_warm_up():
  schedule = make_schedule("constant", 0.4, 4, 10)
  np.testing.assert_allclose([schedule(i) for i in range(6)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_cosine_schedule_ends_near_zero():
  schedule = make_schedule("cosine", 1.0, 2, 12)
  np.testing.assert_allclose([schedule(1), schedule(2), schedule(7)], [1.0, 1.0, 0.5], atol=1e-6)
  assert schedule(12) < 1e-6


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_weight_decay_is_decoupled(name):
  """On a zero gradient the parameters shrink by rate * decay alone (lamb: by its trust ratio)."""
  params = {"w": jnp.full(3, 2.0)}
  optimizer = make_optimizer(name, optax.constant_schedule(0.1), weight_decay=0.5)
  updates, _ = optimizer.update({"w": jnp.zeros(3)}, optimizer.init(params), params)
  expected = -0.1 * 2.0 if name == "lamb" else -0.1 * 0.5 * 2.0
  np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)


def test_sgd_is_nesterov():
  optimizer = make_optimizer("sgd", optax.constant_schedule(1.0), momentum=0.5)
  state = optimizer.init({"w": jnp.zeros(1)})
  first, state = optimizer.update({"w": jnp.ones(1)}, state)
  second, _ = optimizer.update({"w": jnp.ones(1)}, state)
  np.testing.assert_allclose([first["w"][0], second["w"][0]], [-1.5, -1.75])


def test_lamb_equals_optax():
  params, grads = {"w": jnp.arange(1.0, 4.0)}, {"w": jnp.array([0.1, -2.0, 3.0])}
  ours, theirs = make_optimizer("lamb", optax.constant_schedule(0.1)), optax.lamb(0.1)
  a, _ = ours.update(grads, ours.init(params), params)
  b, _ = theirs.update(grads, theirs.init(params), params)
  np.testing.assert_array_equal(a["w"], b["w"])


def test_average_warms_up():
  start, params = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
  np.testing.assert_allclose(update_average(start, params, 0.99, jnp.int32(0))["w"], 0.9)
  np.testing.assert_allclose(
    update_average(start, params, 0.99, jnp.int32(10**6))["w"], 0.01, rtol=1e-4
  )
  np.testing.assert_array_equal(update_average(start, params, 0.0, jnp.int32(5))["w"], 1.0)


def test_bad_names_are_refused():
  with pytest.raises(ValueError, match="optimizer 'magic'"):
    make_optimizer("magic", optax.constant_schedule(0.1))
  with pytest.raises(ValueError, match="schedule 'magic'"):
    make_schedule("magic", 0.1, 0, 10)
  with pytest.raises(ValueError, match="warmup_steps=11"):
    make_schedule("constant", 0.1, 11, 10)
