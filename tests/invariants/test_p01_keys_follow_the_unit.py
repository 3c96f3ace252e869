"""P1 with random numbers in the loss: for any keys that follow the units, one moves the sum by C.

With `exact=True` a unit may be taken out, which moves all later ones to other places: their keys
must not be those of the places.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax

C = 1.0
ENGINES = ("vmap", "ghost", "loop", "auto")
RNG = np.random.default_rng(0)
# Each has another sign than the next: a key that goes to the next unit turns what it lets through.
UNITS = jnp.asarray(10 * (-1) ** np.arange(12)[:, None] * np.ones((12, 6)), jnp.float32)
PARAMS = jnp.asarray(RNG.standard_normal(6), jnp.float32)


def dropout(params, unit, key):
  """One entry of the unit is left: the gradients of two keys are orthogonal, or equal."""
  kept = jax.nn.one_hot(jax.random.randint(key, (), 0, 6), 6)
  return jnp.sum(params * unit * kept)


def _distance(a, b):
  a, b = (np.asarray(x.sum, np.float64) + np.asarray(x.error, np.float64) for x in (a, b))
  return float(np.linalg.norm(a - b))


def _moved(engine, keys, left, **kwargs):
  """How far the sum moves when unit 0 is taken out, in clip norms."""
  grad_fn = dp_jax.clipped_grad(dropout, C, engine=engine, compensated=True, **kwargs)
  some, _ = grad_fn(PARAMS, UNITS, key=keys)
  others, _ = grad_fn(PARAMS, UNITS[1:], key=left)
  return _distance(some, others) / C


def _keys(generator):
  key = jax.random.key(3, impl=generator)
  return jnp.stack([jax.random.fold_in(key, i) for i in range(len(UNITS))])


@pytest.mark.parametrize("engine", ENGINES)
def test_with_keys_that_follow_the_units_one_moves_the_sum_by_c(engine):
  keys = _keys("threefry2x32")
  assert _moved(engine, keys, keys[1:], exact=True) <= 1


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_so_it_is_with_a_generator_whose_vmap_is_not_the_map(engine):
  keys = _keys("rbg")
  assert _moved(engine, keys, keys[1:], exact=True) <= 1


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_where_units_would_share_bits_it_is_refused(engine, generator):
  keys = _keys(generator)
  with pytest.raises(ValueError, match="generator"):
    _moved(engine, keys, keys[1:])


@pytest.mark.parametrize("engine", ENGINES)
def test_one_key_for_all_places_is_refused_where_a_unit_may_be_taken_out(engine):
  with pytest.raises(ValueError, match="a key array, one key a unit"):
    _moved(engine, jax.random.key(3), jax.random.key(3), exact=True)


def test_keys_made_for_a_batch_by_a_generator_that_mixes_them_are_refused():
  keys = _keys("unsafe_rbg")
  with pytest.raises(ValueError, match="unsafe_rbg"):
    _moved("auto", keys, keys[1:], exact=True)


def test_in_their_places_units_may_share_one_key():
  """Where a unit is blanked, and not taken out, all others keep their places and their keys."""
  grad_fn = dp_jax.clipped_grad(dropout, C, compensated=True)
  some, _ = grad_fn(PARAMS, UNITS, key=jax.random.key(3))
  others, _ = grad_fn(PARAMS, UNITS, jnp.arange(len(UNITS)) != 0, jax.random.key(3))
  assert _distance(some, others) <= C


def test_the_broken_variants_move_it_by_more():
  keys = jax.random.key(3)
  assert _moved("vmap", jax.random.split(keys, 12), jax.random.split(keys, 11)) > 2
  bits = jax.vmap(jax.random.bits)
  for generator in ("rbg", "unsafe_rbg"):
    keys = _keys(generator)
    assert not np.array_equal(bits(keys)[1:], bits(keys[1:]))
