"""P16: operations across examples and state-changing forward passes are refused, by name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from support import flags_of, small_config

import dp_jax
from dp_jax.cli import main
from dp_jax.gradients.per_unit import check_loss
from dp_jax.models import build
from dp_jax.models.functional import split
from dp_jax.models.inspect import check_model
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import build_step

IMAGES = jnp.zeros((1, 4))


class Net(nnx.Module):
  """A dense layer with some layer after it."""

  def __init__(self, layer):
    self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    self.after = layer

  def __call__(self, x):
    return self.after(self.dense(x))


class Counter(nnx.Module):
  """Keeps a running mean by hand, in a variable that is no parameter."""

  def __init__(self):
    self.mean = nnx.BatchStat(jnp.zeros(4))

  def __call__(self, x):
    self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
    return x - self.mean[...]


def _check(module):
  model, arrays = split(module)
  check_model(model, arrays, lambda bound: bound(IMAGES))


def test_batch_norm_in_training_mode_is_refused_by_name():
  with pytest.raises(ValueError, match="'after' is a BatchNorm"):
    _check(Net(nnx.BatchNorm(4, rngs=nnx.Rngs(0))))


def test_frozen_statistics_are_fine():
  _check(Net(nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))))


def test_a_running_statistic_is_refused_by_name():
  with pytest.raises(ValueError, match=r"after\.mean"):
    _check(Net(Counter()))


def test_spectral_norm_is_refused():
  inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="changes the state"):
    _check(Net(nnx.SpectralNorm(inner, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("layer", [
  lambda: nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0)),
  lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
  lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0)),
])  # fmt: skip
def test_per_example_layers_and_dropout_are_fine(layer):
  _check(Net(layer()))


def test_the_broken_variant_trains_another_model():
  """What is refused above: with batch statistics, one unit's output depends on the others."""
  module = Net(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
  x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
  assert not np.allclose(module(x)[0], module(x.at[1].set(100.0))[0])


class Mixed(build.ConvNet):
  """A model with something before or after it that may mix examples."""

  before = after = staticmethod(lambda x: x)

  def __call__(self, x):
    return self.after(super().__call__(self.before(x)))


@custom_vmap
def normalised(x):
  """The identity, whose batching rule is a batch normalisation."""
  return 1.0 * x


@normalised.def_vmap
def _(size, batched, x):
  del size
  return (x - x.mean(0) if batched[0] else x), True


def _prepared(monkeypatch, model, **changes):
  monkeypatch.setitem(build.MODELS, "convnet", model)
  return prepare(small_config(**changes))


def test_the_trainer_checks_before_step_0(monkeypatch):
  class Normalised(build.ConvNet):
    def __init__(self, **sizes):
      super().__init__(**sizes)
      self.norms = nnx.List([nnx.BatchNorm(w, rngs=nnx.Rngs(0)) for w in sizes["widths"]])

  with pytest.raises(ValueError, match=r"norms\.0.*BatchNorm"):
    _prepared(monkeypatch, Normalised)


def _counting(x):
  return io_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def _summed_backward(x):
  return x


_summed_backward.defvjp(lambda x: (x, None), lambda _, c: (jax.lax.psum(c, "data"),))


@pytest.mark.parametrize(("where", "mix", "said"), [
  ("after", lambda x: x - jax.lax.pmean(x, "data"), "collective.*data"),
  ("after", _summed_backward, "collective.*data"),
  ("before", _counting, "io_callback"),
])  # fmt: skip
@pytest.mark.parametrize("private", [True, False])
def test_the_command_line_names_the_operation(
  tmp_path, monkeypatch, capsys, where, mix, said, private
):
  monkeypatch.setitem(build.MODELS, "convnet", type("Odd", (Mixed,), {where: staticmethod(mix)}))
  config = small_config(privacy__enabled=private)
  workdir = tmp_path / "run"
  assert main(["train", *flags_of(config), f"--workdir={workdir}"]) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert error.startswith("error: ") and re.search(said, error)
  assert not (workdir / "checkpoints").exists()


def test_the_trainer_refuses_engines_that_would_mix_units(monkeypatch):
  odd = type("Odd", (Mixed,), {"before": staticmethod(normalised)})
  for engine in ("vmap", "ghost"):
    with pytest.raises(ValueError, match=f"engine '{engine}'.*custom_vmap_call"):
      _prepared(monkeypatch, odd, train__engine=engine)
  _prepared(monkeypatch, odd)


def test_without_privacy_units_are_not_mixed_either():
  def loss(frozen, params, unit, key):
    del frozen, key
    return jnp.sum(jnp.tanh(params * normalised(unit)))

  functions = build_step(
    loss, optax.sgd(1.0), clip_norm=None, stddev=0.0, expected_batch_size=1.0, ema=0.0
  )
  params, units = jnp.ones(4), jnp.arange(12.0).reshape(3, 4) / 9
  some = (params, {}, functions.zeros(params), units, jnp.ones(3, bool), jnp.arange(3))
  total, _ = functions.accumulate(*some, jax.random.key(0))
  one_by_one = sum(jax.grad(loss, 1)({}, params, unit, None) for unit in units)
  np.testing.assert_allclose(total.sum[0], one_by_one, rtol=1e-6)


@pytest.mark.parametrize("loss", [
  lambda p, u, k: (p * u) ** 2,  # the losses of the entries, not one loss
  lambda p, u, k: jnp.sum(p * u, keepdims=True),
  lambda p, u, k: (jnp.sum(p * u), 1.0),
  lambda p, u, k: jnp.sum(p * u).astype(jnp.int32),
])  # fmt: skip
def test_a_loss_that_is_not_one_scalar_is_refused(loss):
  with pytest.raises(ValueError, match="real scalar"):
    dp_jax.clipped_grad(loss, 1.0)(jnp.ones(3), jnp.ones((5, 3)))


def test_a_collective_across_units_is_refused():
  def loss(params, unit, key):
    del key
    return jax.lax.pmean(jnp.sum(params * unit), "batch")

  with pytest.raises(ValueError, match="collective"):
    dp_jax.clipped_grad(loss, 1.0)(jnp.ones(3), jnp.ones((5, 3)))


def _outside(x):
  def call(x):
    return np.asarray(x / np.max(np.abs(x)), np.float32)

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jax.pure_callback(call, shape, x, vmap_method="expand_dims")


@pytest.mark.parametrize("mix", [normalised, _outside], ids=["custom_vmap", "callback"])
def test_one_unit_moves_the_sum_by_2_c_where_vmap_is_not_the_map(mix):
  """The broken variant, vmap of jax.grad and then clipping: a masked unit moves it already."""

  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.tanh(params * mix(unit)))

  params = jnp.ones(4)
  units = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32)
  others = units.at[5].set(100.0)
  mask = jnp.arange(6) < 5
  grad_fn = jax.jit(dp_jax.clipped_grad(loss, 0.1))
  np.testing.assert_array_equal(grad_fn(params, units, mask)[0], grad_fn(params, others, mask)[0])
  mixed = jax.vmap(jax.grad(loss), (None, 0, None))
  moved = mixed(params, others, None)[:5] - mixed(params, units, None)[:5]
  assert np.max(np.abs(moved)) > 0.1


def test_calls_out_of_jax_are_what_they_say():
  """A call into a library is batched as it is told to be; with side effects, it is refused."""

  def loss(vmap_method, has_side_effect=False):
    def of_unit(params, unit, key):
      del key
      shape = jax.ShapeDtypeStruct(unit.shape, unit.dtype)
      call = jax.ffi.ffi_call(
        "a_library", shape, vmap_method=vmap_method, has_side_effect=has_side_effect
      )
      return jnp.sum(params * call(unit))

    return of_unit

  args = jnp.ones(3), jnp.ones(3), None
  assert check_loss(loss("sequential"), *args) is None
  for method in ("broadcast_all", "expand_dims", None):
    assert "ffi_call" in check_loss(loss(method), *args)
    with pytest.raises(ValueError, match=r"engine 'vmap'.*ffi_call"):
      dp_jax.clipped_grad(loss(method), 1.0, engine="vmap")(jnp.ones(3), jnp.ones((2, 3)))
  with pytest.raises(ValueError, match=r"side effects.*ffi_call"):
    check_loss(loss("sequential", has_side_effect=True), *args)


def test_a_primitive_that_is_not_known_counts_as_one_that_mixes():
  """Its name says nothing: an exported one is known by identity."""
  odd = jax.extend.core.Primitive("tanh")
  odd.def_abstract_eval(lambda x: x)
  assert check_loss(lambda p, u, k: jnp.sum(p * jnp.tanh(u)), 1.0, jnp.ones(3), None) is None
  said = check_loss(lambda p, u, k: jnp.sum(p * odd.bind(u)), 1.0, jnp.ones(3), None)
  assert "batching rule of its own" in said
