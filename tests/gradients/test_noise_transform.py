"""Noise as a transform, also with a state, and the same one at the front of an optax chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from two_bands import two_bands

import dp_jax
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.noise.optax_noise import as_optax
from dp_jax.gradients.noise.transform import independent

KEY = jax.random.key(7)
STDDEV, BETA = 0.75, 0.5
GRID = 2.0**-14 * STDDEV
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
TOTAL = {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)}


def _assert_equal(tree, expected):
  jax.tree.map(np.testing.assert_array_equal, tree, expected)


def _keys(steps):
  return [jax.random.fold_in(KEY, step) for step in range(steps)]


def test_independent_noise_is_add_noise_and_keeps_nothing():
  noise = independent(STDDEV)
  state = noise.init(PARAMS)
  assert jax.tree.leaves(state) == []
  noised, after = noise.update(pairs.of(TOTAL), state, KEY)
  _assert_equal(noised, dp_jax.add_noise(TOTAL, STDDEV, KEY))
  assert jax.tree.structure(after) == jax.tree.structure(state)
  with pytest.raises(ValueError, match="stddev"):
    independent(0.0)


def test_a_public_chain_is_an_adapter_around_the_same_transform():
  chain = dp_jax.gaussian_noise(STDDEV, KEY)
  state = chain.init(PARAMS)
  for key in _keys(2):
    noised, state = chain.update(TOTAL, state, PARAMS)
    _assert_equal(noised, independent(STDDEV).update(pairs.of(TOTAL), (), key)[0])
  assert state._fields == ("key", "count")  # as in the checkpoints that users have


@pytest.mark.parametrize("kind", ["plain", "pair", "bfloat16", "flatten", "jit"])
def test_noise_with_a_state_goes_through_a_chain(kind):
  """It remembers, step by step, whatever the sum comes as."""
  chain = as_optax(two_bands(BETA)(STDDEV), KEY)
  chain = optax.flatten(chain) if kind == "flatten" else optax.chain(chain, optax.scale(1.0))
  total = {"pair": pairs.of(TOTAL), "bfloat16": optax.tree.cast(TOTAL, jnp.bfloat16)}
  total = total.get(kind, TOTAL)
  update = jax.jit(chain.update, donate_argnums=1) if kind == "jit" else chain.update
  state = chain.init(PARAMS)
  got = []
  for _ in range(3):
    noised, state = update(total, state, PARAMS)
    got.append(noised)
  if kind == "flatten":  # whose one leaf has another path, and so other noise
    assert state.noise.shape == (8,) and not (got[0]["w"] == got[1]["w"]).any()
    return
  draws = [dp_jax.add_noise(jax.tree.map(jnp.zeros_like, TOTAL), STDDEV, key) for key in _keys(3)]
  _assert_equal(state[0].noise, draws[-1])
  for step, noised in enumerate(got):
    for name, value in noised.items():
      before = BETA * draws[step - 1][name] if step else 0.0
      np.testing.assert_allclose(value, TOTAL[name] + draws[step][name] + before, atol=GRID)


def test_guards_of_the_chain_hold_for_any_noise():
  chain = as_optax(two_bands(BETA)(STDDEV), KEY)
  shapes = jax.eval_shape(chain.init, PARAMS)
  state = chain.init(PARAMS)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)
  with pytest.raises(ValueError, match="inside a traced function"):
    jax.jit(chain.init)(PARAMS)
  rows = jax.tree.map(lambda x: jnp.stack([x, x]), TOTAL)
  with pytest.raises(ValueError, match="takes the sum over units"):
    chain.update(rows, state, PARAMS)
  with pytest.raises(ValueError, match="vmap"):
    jax.vmap(chain.update, (0, None, None))(rows, state, PARAMS)
