"""P17: norms and sums in float32 or better whatever the compute dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax

HALF = jnp.bfloat16
UNITS = 300
PARAMS = {"w": jnp.ones((4, 3), jnp.float32), "s": jnp.ones(3, jnp.float32)}
X = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (UNITS, 2, 4)), jnp.float32)


def loss_fn(params, unit, key):
  """All in bf16; every unit's gradient points in nearly the same direction."""
  del key
  hidden = unit.astype(HALF) @ params["w"].astype(HALF) * params["s"].astype(HALF)
  return jnp.sum(hidden * jnp.asarray([1.0, 2.0, 3.0], HALF)).astype(jnp.float32)


def _summed_in_bf16(params, units, mask):
  """The broken variant: the gradient of the scaled sum of losses, whose dtype is the model's."""
  _, aux = dp_jax.clipped_grad(loss_fn, 1.0)(params, units, mask)
  scales = jnp.where(mask, jnp.minimum(1.0, 1.0 / aux.norms), 0.0).astype(HALF)
  half = jax.tree.map(lambda x: x.astype(HALF), params)

  def total(half):
    return jnp.sum(scales * jax.vmap(loss_fn, (None, 0, None))(half, units, None).astype(HALF))

  return jax.tree.map(lambda g: np.asarray(g, np.float64), jax.grad(total)(half))


def _clipped(engine, memory_budget=2**30, microbatch_size=None):
  grad_fn = dp_jax.clipped_grad(
    loss_fn, 1.0, engine=engine, compensated=True, memory_budget=memory_budget,
    microbatch_size=microbatch_size,
  )  # fmt: skip

  def total(params, units, mask):
    pair, _ = grad_fn(params, units, mask)
    return jax.tree.map(
      lambda s, e: np.asarray(s, np.float64) + np.asarray(e, np.float64), pair.sum, pair.error
    )

  return total


def _largest_move(total_of):
  whole = total_of(PARAMS, X, jnp.ones(UNITS, bool))
  moves = []
  for i in (0, 1, 150, UNITS - 1):
    without = total_of(PARAMS, X, jnp.arange(UNITS) != i)
    squared = jax.tree.map(lambda a, b: np.sum((a - b) ** 2), whole, without)
    moves.append(np.sqrt(sum(jax.tree.leaves(squared))))
  return max(moves)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
@pytest.mark.parametrize("memory_budget", [0, 2**30])
@pytest.mark.parametrize("microbatch_size", [None, 64])
def test_no_unit_of_a_bf16_model_moves_the_sum_by_more_than_c(
  engine, memory_budget, microbatch_size
):
  assert 0.99 < _largest_move(_clipped(engine, memory_budget, microbatch_size)) <= 1.0


def test_sums_in_bf16_are_caught():
  assert _largest_move(_summed_in_bf16) > 1.0


def _without_scale(params, unit, key):
  """Operands and cotangents are exact in bf16."""
  return loss_fn({**params, "s": jnp.ones(3)}, unit, key)


def _norms_in_bf16(params):
  """The broken variant: gradients, and their squares, added in bf16."""
  half = jax.tree.map(lambda x: x.astype(HALF), params)
  grads = jax.vmap(jax.grad(_without_scale), (None, 0, None))(half, X, None)["w"]
  return jnp.sqrt(jnp.sum(jnp.square(grads).reshape(UNITS, -1), 1))


def test_norms_are_float32_and_those_of_bf16_are_caught():
  params = {"w": PARAMS["w"]}
  _, aux = dp_jax.clipped_grad(_without_scale, 1.0, engine="ghost")(params, X)
  assert aux.norms.dtype == jnp.float32
  # The gradient is the outer product of the tokens' sum and (1, 2, 3).
  tokens = np.asarray(X.astype(HALF), np.float64).sum(1)
  exact = np.linalg.norm(tokens, axis=1) * np.sqrt(14)
  assert np.max(np.abs(np.asarray(aux.norms) / exact - 1)) < 1e-5
  broken = np.asarray(_norms_in_bf16(params), np.float64)
  assert np.max(np.abs(broken / exact - 1)) > 1e-3
