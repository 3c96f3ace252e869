"""P14: norms cover exactly the trained parameters, tied ones once, frozen ones not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dp_jax

RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.standard_normal((7, 4)), jnp.float32)
WEIGHT = jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)
IDS = jnp.asarray(RNG.integers(0, 7, (5, 6)), jnp.int32)


def _loss(table, out_table, weight, unit):
  logits = jnp.tanh(table[unit] @ weight) @ out_table.T
  return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(6), jnp.roll(unit, -1)])


def _tied(params, unit, key):
  del key
  return _loss(params["table"], params["table"], params["weight"], unit)


def _two_layers(params, unit, key):
  """The broken variant: each place of the table is a parameter of its own."""
  del key
  return _loss(params["table"], params["out_table"], params["weight"], unit)


def _frozen(params, unit, key):
  del key
  return _loss(params["table"], params["table"], WEIGHT, unit)


def _norms(loss, params, engine):
  grad_fn = dp_jax.clipped_grad(loss, 1e6, engine=engine)
  return np.asarray(grad_fn(params, IDS)[1].norms)


def _reference(loss, params):
  """One unit at a time, by jax.grad, in float64."""
  norms = []
  for unit in IDS:
    grads = jax.tree.leaves(jax.grad(loss)(params, unit, None))
    norms.append(np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads)))
  return np.asarray(norms)


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_tied_parameters_count_once(engine):
  params = {"table": TABLE, "weight": WEIGHT}
  reference = _reference(_tied, params)
  np.testing.assert_allclose(_norms(_tied, params, engine), reference, rtol=1e-4)
  twice = _norms(_two_layers, {**params, "out_table": TABLE}, engine)
  assert np.max(np.abs(twice / reference - 1)) > 0.01


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_frozen_parameters_do_not_count(engine):
  reference = _reference(_frozen, {"table": TABLE})
  np.testing.assert_allclose(_norms(_frozen, {"table": TABLE}, engine), reference, rtol=1e-4)
  both = _norms(_tied, {"table": TABLE, "weight": WEIGHT}, engine)
  assert np.max(np.abs(both / reference - 1)) > 0.01


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_a_parameter_without_gradient_adds_nothing(engine):
  def stopped(params, unit, key):
    return _tied({**params, "weight": jax.lax.stop_gradient(params["weight"])}, unit, key)

  params = {"table": TABLE, "weight": WEIGHT, "unused": WEIGHT}
  total, _ = dp_jax.clipped_grad(stopped, 1.0, engine=engine)(params, IDS)
  assert not np.any(total["weight"])
  assert not np.any(total["unused"])
  np.testing.assert_allclose(
    _norms(stopped, params, engine), _norms(_frozen, {"table": TABLE}, engine), rtol=1e-4
  )


@pytest.mark.parametrize("engine", ["vmap", "ghost", "loop"])
def test_a_filter_of_nnx_chooses_what_counts(engine):
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.body, self.head = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
      return self.head(jnp.tanh(self.body(x)))

  graph, head, rest = nnx.split(Net(nnx.Rngs(0)), nnx.PathContains("head"), ...)

  def loss(params, unit, key):
    del key
    return jnp.sum(nnx.merge(graph, params, rest)(unit) ** 2)

  units = jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)
  total, aux = dp_jax.clipped_grad(loss, 1e6, engine=engine)(head, units)
  assert jax.tree.structure(total) == jax.tree.structure(head)
  for unit, norm in zip(units, aux.norms, strict=True):
    grads = jax.tree.leaves(jax.grad(loss)(head, unit, None))
    expected = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads))
    np.testing.assert_allclose(norm, expected, rtol=1e-4)
