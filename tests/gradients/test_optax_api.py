"""The optax front: chains, and an aggregate without the errors of optax's own.

Each of those errors is shown on optax's transform, and then to be absent here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dp_jax
from dp_jax.gradients.compensated import Compensated

KEY = jax.random.key(11)
CLIP_NORM, EXPECTED = 1.5, 4.0
# So little noise that sums show through it.
FAINT = 1e-9
RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.standard_normal((3, 2)), jnp.float32), "b": jnp.ones(2)}
GRADS = {
  "w": np.float32(RNG.standard_normal((5, 3, 2)) * np.array([0.1, 1, 10, 1, 0.3])[:, None, None]),
  "b": np.float32(RNG.standard_normal((5, 2))),
}


def _theirs(noise_multiplier=0.0, key=KEY):
  return optax.contrib.differentially_private_aggregate(CLIP_NORM, noise_multiplier, key)


def _ours(noise_multiplier=FAINT, key=KEY, expected=EXPECTED):
  return dp_jax.differentially_private_aggregate(CLIP_NORM, noise_multiplier, key, expected)


def _apply(transform, grads, **extra):
  return transform.update(grads, transform.init(PARAMS), PARAMS, **extra)[0]


def _rows(grads, rows):
  return jax.tree.map(lambda g: g[np.asarray(rows, int)], grads)


def _norm(tree):
  squares = [np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)]
  return np.sqrt(sum(squares))


def _assert_close(tree, expected, rtol=2e-3):
  """To within the clipping margin."""
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), tree, expected)


def test_agrees_with_optax_where_optax_is_right():
  """Finite float32 gradients, no padding, and a divisor that is the batch."""
  got = _apply(_ours(expected=5.0), GRADS)
  _assert_close(got, _apply(_theirs(), GRADS))
  again = jax.jit(lambda g, s: _ours(expected=5.0).update(g, s)[0])(GRADS, _ours().init(PARAMS))
  _assert_close(again, got, rtol=1e-6)


def test_is_first_in_a_chain_with_any_optimizer():
  chain = optax.chain(_ours(0.1), optax.adam(0.1))
  state = chain.init(PARAMS)
  mask = np.array([1, 1, 1, 1, 0], bool)
  update = jax.jit(lambda g, s, p: chain.update(g, s, p, mask=mask))
  updates, state = update(GRADS, state, PARAMS)
  assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)
  assert state[0].count == 1


def test_noise_has_its_scale_and_is_new_in_each_update_and_leaf():
  size = 2**16
  params = {"a": jnp.zeros(size), "b": jnp.zeros(size)}
  transform = _ours(0.7)
  state, rows = transform.init(params), []
  for _ in range(2):
    none = jax.tree.map(lambda p: jnp.zeros((3, *p.shape)), params)
    noised, state = jax.jit(transform.update)(none, state)
    rows += [np.asarray(noised["a"], np.float64), np.asarray(noised["b"], np.float64)]
  stds = np.std(rows, axis=1) * EXPECTED / (0.7 * CLIP_NORM)
  assert np.abs(stds - 1).max() < 6 / np.sqrt(2 * size)
  assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 6 / np.sqrt(size)


def test_a_key_that_anybody_can_guess():
  theirs = _apply(_theirs(1.0, key=7), GRADS)
  guessed = _apply(_theirs(1.0, key=jax.random.key(7)), GRADS)
  assert all((theirs[n] == guessed[n]).all() for n in theirs)
  for key in (7, None, jax.random.PRNGKey(7)):
    with pytest.raises(ValueError, match="typed key"):
      _ours(1.0, key=key)
  with pytest.raises(TypeError):
    dp_jax.differentially_private_aggregate(CLIP_NORM, 1.0)


def test_the_divisor_tells_the_size_of_the_batch():
  """Zero gradients in all but one unit: their number is all that differs."""
  lone = jax.tree.map(lambda g: g * (np.arange(5) == 0).reshape(-1, *(1,) * (g.ndim - 1)), GRADS)
  theirs = [_norm(_apply(_theirs(), _rows(lone, range(n)))) for n in (5, 1)]
  assert theirs[1] > 4.9 * theirs[0]
  ours = [_norm(_apply(_ours(), _rows(lone, range(n)))) for n in (5, 1)]
  np.testing.assert_allclose(ours[0], ours[1], rtol=1e-6)
  for divisor in (0, -1.0, float("inf"), float("nan"), jnp.float32(3), None):
    with pytest.raises(ValueError, match="public divisor"):
      _ours(expected=divisor)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_unit_that_is_not_finite_spoils_the_update(value):
  bad = jax.tree.map(np.copy, GRADS)
  bad["w"][2, 0, 0] = value
  assert not np.isfinite(_norm(_apply(_theirs(), bad)))
  _assert_close(_apply(_ours(), bad), _apply(_ours(), _rows(GRADS, [0, 1, 3, 4])), rtol=1e-6)


def test_padding_that_counts():
  """Optax takes no mask: padding with anything but zeros is another unit."""
  padded = jax.tree.map(lambda g: np.concatenate([g, np.full_like(g[:3], np.nan)]), GRADS)
  mask = np.arange(8) < 5
  with pytest.raises(TypeError):
    _apply(_theirs(), padded, mask=mask)
  got = _apply(_ours(), padded, mask=mask)
  expected = _apply(_ours(), GRADS)
  assert all((got[n] == expected[n]).all() for n in got)
  for wrong in (mask[:5], mask.astype(np.float32)):
    with pytest.raises(ValueError, match="mask must be bool"):
      _apply(_ours(), padded, mask=wrong)


def test_bfloat16_norms_let_a_unit_exceed_the_clip_norm():
  rng = np.random.default_rng(3)

  def largest(transform, divisor):
    norms = []
    for _ in range(40):
      one = {n: jnp.asarray(9 * rng.standard_normal((1, *p.shape)), jnp.bfloat16)
             for n, p in PARAMS.items()}  # fmt: skip
      norms.append(_norm(_apply(transform, one)) * divisor)
    return max(norms)

  assert largest(_theirs(), 1) > 1.003 * CLIP_NORM
  assert largest(_ours(), EXPECTED) <= CLIP_NORM
  one = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), GRADS)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(_apply(_ours(), one)))


def test_a_key_that_is_compiled_into_the_program():
  key = jax.random.wrap_key_data(jnp.asarray([305419896, 2596069104], jnp.uint32))
  text = jax.jit(_theirs(1.0, key).init).lower(PARAMS).as_text("hlo")
  assert "305419896" in text
  with pytest.raises(ValueError, match="inside a traced function"):
    jax.jit(_ours(1.0, key).init)(PARAMS)


def test_an_empty_batch_is_noise_alone():
  noised = _apply(_ours(1.0), _rows(GRADS, []))
  assert 0 < _norm(noised) < 10 and not np.isfinite(_norm(_apply(_theirs(1.0), _rows(GRADS, []))))


def test_refuses_what_is_not_per_example():
  with pytest.raises(ValueError, match="per-example gradients"):
    _apply(_ours(), {"w": GRADS["w"], "b": GRADS["b"][:2]})
  with pytest.raises(ValueError, match="per-example gradients"):
    _apply(_ours(), jnp.float32(0))
  with pytest.raises(ValueError, match="clip_norm"):
    dp_jax.differentially_private_aggregate(0.0, 1.0, KEY, EXPECTED)
  with pytest.raises(ValueError, match="stddev"):
    _ours(0.0)


OPTIMIZERS = {
  "sgd": (dp_jax.dp_sgd, optax.sgd(0.1)),
  "adam": (dp_jax.dp_adam, optax.adam(0.1)),
  "lamb": (dp_jax.dp_lamb, optax.lamb(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("compensated", [False, True])
def test_a_chain_is_noise_then_the_public_divisor_then_the_optimizer(name, compensated):
  make, plain = OPTIMIZERS[name]
  optimizer = make(0.1, 0.3, KEY, EXPECTED)
  state, plain_state = optimizer.init(PARAMS), plain.init(PARAMS)
  update = jax.jit(optimizer.update)
  for step in range(2):
    total = jax.tree.map(lambda p: p + step, PARAMS)  # noqa: B023
    given = Compensated(total, jax.tree.map(jnp.zeros_like, total)) if compensated else total
    got, state = update(given, state, PARAMS)
    noised = dp_jax.add_noise(total, 0.3, jax.random.fold_in(KEY, step))
    mean = jax.tree.map(lambda x: x / EXPECTED, noised)
    expected, plain_state = plain.update(mean, plain_state, PARAMS)
    _assert_close(got, expected, rtol=1e-5)


def test_a_loop_of_ones_own_learns():
  rng = np.random.default_rng(1)
  x = rng.standard_normal((64, 3)).astype(np.float32)
  units = {"x": x, "y": x @ np.float32([1.0, -2.0, 0.5])}
  grad_fn = dp_jax.clipped_grad(lambda w, u, key: (u["x"] @ w - u["y"]) ** 2, 1.0)
  optimizer = dp_jax.dp_sgd(0.2, 0.5, KEY, 64.0, momentum=0.5)
  params = jnp.zeros(3)
  state = optimizer.init(params)

  @jax.jit
  def step(params, state):
    total, aux = grad_fn(params, units)
    updates, state = optimizer.update(total, state, params)
    return optax.apply_updates(params, updates), state, jnp.mean(aux.losses)

  losses = []
  for _ in range(60):
    params, state, loss = step(params, state)
    losses.append(float(loss))
  assert losses[-1] < 0.05 * losses[0]


def test_per_example_gradients_are_refused_by_the_optimizers():
  optimizer = dp_jax.dp_sgd(0.1, 0.3, KEY, EXPECTED)
  with pytest.raises(ValueError, match="takes the sum over units"):
    optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
