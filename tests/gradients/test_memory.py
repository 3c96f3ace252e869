"""`microbatch_size="auto"`: the largest that XLA says will fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax
from dp_jax.gradients.engines.memory import largest_microbatch, temporary_bytes

PARAMS = {"a": jnp.ones((60, 80)) / 60, "b": jnp.ones((80, 50)) / 80}
UNITS = np.random.default_rng(0).standard_normal((48, 60)).astype(np.float32)


def loss_fn(params, unit, key):
  noise = 0.0 if key is None else jax.random.uniform(key)
  return jnp.sum(jnp.tanh(unit @ params["a"]) @ params["b"]) + noise


def _grad_fn(microbatch_size, budget=2**30):
  return dp_jax.clipped_grad(
    loss_fn, 1.0, engine="vmap", microbatch_size=microbatch_size, memory_budget=budget
  )


def _bytes(microbatch_size):
  return temporary_bytes(_grad_fn(microbatch_size), PARAMS, UNITS)


def _sizes_that_run(budget, monkeypatch, key=None):
  """The microbatch sizes at which the reference engine is traced by a call under "auto"."""
  from dp_jax.gradients.engines import dispatch

  seen, original = [], dispatch._by_vmap

  def by_vmap(loss, params, units, mask, *rest):
    seen.append(mask.shape[0])
    return original(loss, params, units, mask, *rest)

  monkeypatch.setattr(dispatch, "_by_vmap", by_vmap)
  total, _ = jax.jit(_grad_fn("auto", budget))(PARAMS, UNITS, None, key)
  return seen, total


def test_the_largest_that_fits_is_used(monkeypatch):
  """The last size to be traced is the one that runs, inside the caller's own jit."""
  budget = (_bytes(8) + _bytes(16)) // 2
  seen, total = _sizes_that_run(budget, monkeypatch)
  assert seen[-1] == 8 and seen[0] == 48
  expected, _ = _grad_fn(None)(PARAMS, UNITS)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), total, expected)


def test_the_whole_batch_if_it_fits_also_where_it_is_no_power_of_two(monkeypatch):
  seen, _ = _sizes_that_run(2**30, monkeypatch, jax.random.key(0))
  assert set(seen) == {48}


def test_outside_jit_it_is_asked_once(monkeypatch):
  from dp_jax.gradients import clipping

  asked, original = [], clipping.temporary_bytes

  def counted(function, *args):
    asked.append(function.microbatch_size)
    return original(function, *args)

  monkeypatch.setattr(clipping, "temporary_bytes", counted)
  grad_fn = _grad_fn("auto", 2**29)
  for _ in range(2):
    grad_fn(PARAMS, UNITS)
  assert asked == [48]


def test_one_unit_that_does_not_fit_is_an_error_that_says_so():
  with pytest.raises(ValueError, match=r"one unit takes [\d,]+ bytes .* memory_budget=1,000"):
    _grad_fn("auto", 1000)(PARAMS, UNITS)


@pytest.mark.parametrize("budget", [2**30, 2**19])
def test_a_loss_may_close_over_traced_values(budget):
  @functools.partial(jax.jit, static_argnums=1)
  def total(frozen, microbatch_size):
    def loss(params, unit, key):
      return loss_fn(params, unit, key) * jnp.sum(frozen)

    grad_fn = dp_jax.clipped_grad(
      loss, 1.0, engine="vmap", microbatch_size=microbatch_size, memory_budget=budget
    )
    return grad_fn(PARAMS, UNITS)[0]

  got, expected = (total(jnp.full(3, 0.1), size) for size in ("auto", None))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def test_no_units():
  assert _grad_fn("auto")(PARAMS, UNITS[:0])[1].norms.shape == (0,)


@pytest.mark.parametrize(("num_units", "budget", "expected"), [
  (1, 1, 1), (100, 100, 100), (100, 99, 64), (64, 63, 32), (65, 64, 64), (3, 2, 2), (1000, 1, 1),
])  # fmt: skip
def test_the_search(num_units, budget, expected):
  assert largest_microbatch(lambda count: count, num_units, budget) == expected
  with pytest.raises(ValueError, match="one unit takes"):
    largest_microbatch(lambda count: count + budget, num_units, budget)


@pytest.mark.parametrize("size", [0, -1, "all", 1.5])
def test_refuses_a_size(size):
  with pytest.raises(ValueError, match="microbatch_size"):
    dp_jax.clipped_grad(loss_fn, 1.0, microbatch_size=size)
