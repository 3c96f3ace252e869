"""Schedules, optimizers and the moving average, against values by hand; and half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dp_jax
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


KEY = jax.random.key(5)
HALF = [jnp.float16, jnp.bfloat16]
CHAINS = {
  "sgd": lambda *args: dp_jax.dp_sgd(*args, momentum=0.9, weight_decay=0.1),
  "adam": lambda *args: dp_jax.dp_adam(*args, weight_decay=0.1),
  "lamb": lambda *args: dp_jax.dp_lamb(*args, weight_decay=0.1),
}


def test_adam_on_float16_parameters_does_not_divide_by_a_second_moment_of_zero():
  """Zero gradients: noise of 1 / 1024, whose square float16 does not hold."""
  optimizer = dp_jax.dp_adam(1e-3, 1.0, KEY, 1024.0)
  reached = {}
  for dtype in (jnp.float16, jnp.float32):
    params = {"w": jnp.zeros(64, dtype)}
    state, updates = optimizer.init(params), []
    for _ in range(5):
      update, state = optimizer.update({"w": jnp.zeros(64)}, state, params)
      updates.append(update["w"])
    reached[dtype] = np.abs(updates).max()
  assert reached[jnp.float16] == reached[jnp.float32] <= 1.001e-3


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_the_second_moment_of_ones_is_one_after_3000_steps(name, dtype):
  params = {"w": jnp.zeros(2, dtype)}
  optimizer = make_optimizer(name, 1e-3)

  def step(state, _):
    return optimizer.update({"w": jnp.ones(2)}, state, params)[1], None

  state, _ = jax.jit(lambda s: jax.lax.scan(step, s, None, length=3000))(optimizer.init(params))
  nu = state[0].nu["w"]
  assert nu.dtype == jnp.float32 and state[0].count == 3000
  np.testing.assert_allclose(nu / (1 - 0.999**3000), 1.0, rtol=1e-4)


@pytest.mark.parametrize("dtype", [*HALF, jnp.float32])
@pytest.mark.parametrize("name", CHAINS)
def test_a_loop_carries_one_state_and_parameters_of_any_precision(name, dtype):
  params = {"w": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(3, 2), "b": jnp.ones((), dtype)}
  optimizer = CHAINS[name](optax.constant_schedule(0.1), 1.0, KEY, 64.0)
  total = jax.tree.map(lambda p: jnp.ones(p.shape), params)

  def step(carry, _):
    params, state = carry
    updates, state = optimizer.update(total, state, params)
    return (optax.apply_updates(params, updates), state), updates

  start = params, optimizer.init(params)
  after, updates = jax.jit(lambda c: jax.lax.scan(step, c, None, length=3))(start)
  shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (start, after)]
  assert shapes[0] == shapes[1]
  floats = [
    x for x in jax.tree.leaves((start[1], updates)) if jnp.issubdtype(x.dtype, jnp.floating)
  ]
  assert len(floats) >= 4 - 2 * (name == "sgd") and all(x.dtype == jnp.float32 for x in floats)
  assert not (after[0]["w"] == params["w"]).any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CHAINS)
def test_updates_are_those_of_the_same_parameters_in_float32(name, dtype):
  """Decay and norms too: of 70,000 float16 the sum of squares is infinite."""
  half = {"w": jnp.full(70_000, 1.5, dtype)}
  optimizer = CHAINS[name](0.1, 1.0, KEY, 64.0)
  got = []
  for params in (half, jax.tree.map(lambda p: p.astype(jnp.float32), half)):
    state = optimizer.init(params)
    for _ in range(2):
      update, state = optimizer.update({"w": jnp.ones(70_000)}, state, params)
    got.append(update["w"])
  assert np.isfinite(got[0]).all()
  np.testing.assert_array_equal(*got)


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_an_optimizer_starts_from_shapes_or_numbers(name):
  optimizer = make_optimizer(name, 0.1)
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  shapes = jax.eval_shape(lambda: params)
  started = [optimizer.init(params), optimizer.init(shapes), jax.jit(optimizer.init)(params)]
  for state in started[1:]:
    jax.tree.map(np.testing.assert_array_equal, started[0], state)
  updates, _ = optimizer.update({"w": jnp.float32(1)}, optimizer.init({"w": 2.0}), {"w": 2.0})
  assert updates["w"].dtype == jnp.float32


def test_momentum_and_decay_may_be_arrays():
  """As `optax.inject_hyperparams` gives them, under jit."""
  params = {"w": jnp.ones(3)}

  @jax.jit
  def update(momentum, decay):
    optimizer = make_optimizer("sgd", 0.1, momentum=momentum, weight_decay=decay)
    return optimizer.update(params, optimizer.init(params), params)[0]["w"]

  np.testing.assert_allclose(update(0.0, 0.0), -0.1)
  np.testing.assert_allclose(update(0.5, 2.0), -0.1 * (1.5 + 2.0))
