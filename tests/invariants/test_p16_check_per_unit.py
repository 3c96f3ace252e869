"""P16 in a loop that is written by hand: `dp_jax.check_per_unit`."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dp_jax

UNIT = {"x": jnp.ones(3), "y": jnp.asarray(1)}


class LinenNet(nn.Module):
  """A layer, a norm, and a head."""

  train: bool

  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=not self.train, name="norm")(nn.Dense(4, name="body")(x))
    return nn.Dense(2, name="head")(nn.relu(x))


class NnxNet(nnx.Module):
  """The same."""

  def __init__(self):
    self.body = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.head(nnx.relu(self.norm(self.body(x))))


def _linen(train, jitted=False):
  """(loss, params) of a loop that passes one example as a batch of one."""
  variables = LinenNet(True).init(jax.random.key(0), jnp.ones((1, 3)))
  stats = {"batch_stats": variables["batch_stats"]}

  def apply(params, x):
    return LinenNet(train).apply({"params": params, **stats}, x, mutable=["batch_stats"])[0]

  apply = jax.jit(apply) if jitted else apply
  return lambda p, u, k: jnp.sum(apply(p, u["x"][None])[0][u["y"]]), variables["params"]


def _nnx(train):
  model = NnxNet()
  model.train() if train else model.eval()
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def loss(params, unit, key):
    del key
    return jnp.sum(nnx.merge(graph, params, rest)(unit["x"][None])[0][unit["y"]])

  return loss, params, model


@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_norm_of_linen_is_refused_by_name(jitted):
  loss, params = _linen(train=True, jitted=jitted)
  # The broken variant, and, jitted, a trace that would be used again: nothing reaches the body.
  grads = jax.grad(loss)(params, UNIT, None)
  np.testing.assert_array_equal(grads["body"]["kernel"], 0)
  with pytest.raises(ValueError, match="'norm' is a BatchNorm in training mode"):
    dp_jax.check_per_unit(loss, params, UNIT)
  assert dp_jax.check_per_unit(*_linen(train=False, jitted=jitted), UNIT) == ()


def test_a_batch_norm_of_nnx_is_refused():
  loss, params, model = _nnx(train=True)
  with pytest.raises(ValueError, match="BatchNorm of 4 features"):
    dp_jax.check_per_unit(loss, params, UNIT)
  with pytest.raises(ValueError, match="'norm' is a BatchNorm"):
    dp_jax.check_per_unit(loss, params, UNIT, module=model)
  with pytest.raises(ValueError, match="BatchNorm"):  # bound, and closed over
    dp_jax.check_per_unit(lambda p, u, k: p * jnp.sum(model(u["x"][None])), 1.0, UNIT)
  loss, params, model = _nnx(train=False)
  assert dp_jax.check_per_unit(loss, params, UNIT, module=model) == ()


def test_after_it_layers_are_as_before():
  model = _nnx(train=True)[2]
  with pytest.raises(ValueError, match="BatchNorm"):
    dp_jax.check_per_unit(lambda p, u, k: p * jnp.sum(model(u["x"][None])), 1.0, UNIT)
  assert model(jnp.ones((2, 3))).shape == (2, 2)


def by_hand(params, unit, key):
  """Normalised by the statistics of its own batch of one, without any module."""
  del key
  x = unit["x"][None] @ params["w"]
  x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
  return jnp.sum((x + params["b"]) @ params["head"]) ** 2


PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4), "head": jnp.zeros((4, 2))}


def test_parameters_that_nothing_reaches_are_warned_of():
  with pytest.warns(UserWarning, match="gradient of w is zero"):
    assert dp_jax.check_per_unit(by_hand, PARAMS, UNIT) == ("w",)


def test_gradients_that_vanish_at_initial_values_alone_are_not():
  """A head of zeros hides the body at first."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    dp_jax.check_per_unit(
      lambda p, u, k: jnp.sum(jnp.tanh(u["x"] @ p["w"] + p["b"]) @ p["head"]) ** 2, PARAMS, UNIT
    )


def test_no_value_of_a_unit_is_used():
  """A gradient that vanishes on real units alone would tell of them; shapes do as well."""

  def loss(params, unit, key):
    del key
    return jnp.sum(params["table"][unit["y"]]) * (unit["x"][0] != 1.0) * params["scale"]

  params = {"table": jnp.ones((2, 3)), "scale": jnp.ones(())}
  assert jax.grad(loss)(params, UNIT, None)["scale"] == 0
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), UNIT)
  for unit in (UNIT, shapes):
    assert dp_jax.check_per_unit(loss, params, unit) == ()
  public = jax.tree.map(lambda x: jnp.stack([x, x]), UNIT)
  with pytest.warns(UserWarning, match="gradient of scale, table"):
    dp_jax.check_per_unit(loss, params, UNIT, units=public)


def test_what_clipped_grad_refuses_is_refused():
  with pytest.raises(ValueError, match="collective"):
    dp_jax.check_per_unit(lambda p, u, k: jax.lax.psum(jnp.sum(p * u), "i"), 1.0, jnp.ones(3))
  with pytest.raises(ValueError, match="real scalar"):
    dp_jax.check_per_unit(lambda p, u, k: p * u, 1.0, jnp.ones(3))


def test_a_loss_that_draws_numbers():
  def loss(params, unit, key):
    return jnp.sum(params * unit * jax.random.bernoulli(key, 0.5, unit.shape))

  assert dp_jax.check_per_unit(loss, jnp.ones(8), jnp.ones(8), jax.random.key(0)) == ()
