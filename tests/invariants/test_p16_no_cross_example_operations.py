"""P16: operations across examples and state-changing forward passes are refused, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dp_jax
from dp_jax.models.functional import split
from dp_jax.models.inspect import check_model

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


def test_the_trainer_checks_before_step_0(monkeypatch):
  from dp_jax.models import build
  from dp_jax.training.config import Config
  from dp_jax.training.prepare import prepare

  class Normalised(build.ConvNet):
    def __init__(self, **sizes):
      super().__init__(**sizes)
      self.norms = nnx.List([nnx.BatchNorm(w, rngs=nnx.Rngs(0)) for w in sizes["widths"]])

  monkeypatch.setitem(build.MODELS, "convnet", Normalised)
  config = Config.from_dict({
    "data": {"source": "digits"}, "train": {"steps": 1}, "model": {"widths": [8, 16]},
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "sampling_rate": 0.1},
  })  # fmt: skip
  with pytest.raises(ValueError, match=r"norms\.0.*BatchNorm"):
    prepare(config)


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
