"""Before step 0 the fast engine is compared with the reference, and gives way where it is wrong."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_config

from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.ghost import engine as ghost
from dp_jax.training.setup import engine_check
from dp_jax.training.setup.engine_check import choose_engine
from dp_jax.training.setup.prepare import prepare


@pytest.fixture(scope="module")
def run():
  return prepare(small_config())


def _with_engine(run, engine):
  train = dataclasses.replace(run.config.train, engine=engine)
  return dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))


def _broken(monkeypatch, norms_factor, sums_factor):
  original = ghost.clipped_sum

  def clipped_sum(*args):
    total, norms, losses = original(*args)
    return jax.tree.map(lambda x: sums_factor * x, total), norms_factor * norms, losses

  monkeypatch.setattr(ghost, "clipped_sum", clipped_sum)


def test_a_right_engine_is_kept(run):
  assert choose_engine(run) == "auto"
  assert choose_engine(_with_engine(run, "ghost")) == "ghost"
  assert choose_engine(_with_engine(run, "vmap")) == "vmap"


@pytest.mark.parametrize(("norms_factor", "sums_factor"), [(0.5, 1.0), (1.0, 2.0)])
def test_a_wrong_engine_gives_way_with_a_warning(
  run, monkeypatch, caplog, norms_factor, sums_factor
):
  _broken(monkeypatch, norms_factor, sums_factor)
  with caplog.at_level(logging.WARNING):
    assert choose_engine(run) == "loop"
  assert "disagrees" in caplog.text
  with pytest.raises(ValueError, match="disagrees with the reference"):
    choose_engine(_with_engine(run, "ghost"))


def test_the_made_up_units_say_nothing_of_the_data(run):
  units = run.task.made_up_units(3, 1)
  other = prepare(small_config(data__seed=5)).task.made_up_units(3, 1)
  jax.tree.map(np.testing.assert_array_equal, units, other)


def _wrong_in(monkeypatch, leaf, broken):
  original = ghost.clipped_sum

  def clipped_sum(*args):
    total, norms, losses = original(*args)
    changed = {**total.sum, leaf: broken(total.sum[leaf])}
    return total._replace(sum=changed), norms, losses

  monkeypatch.setattr(ghost, "clipped_sum", clipped_sum)


def _with_small_branch(run):
  """A parameter whose whole gradient is a thousandth of the clip norm, and one without any."""

  class Task:
    def __getattr__(self, name):
      return getattr(run.task, name)

    def loss(self, frozen, params, unit, key):
      rest = {name: x for name, x in params.items() if name not in ("small", "zero")}
      image = next(x for x in jax.tree.leaves(unit) if jnp.issubdtype(x.dtype, jnp.floating))
      some = 0.01 * jnp.resize(image, 6)
      branch = jnp.sum(jnp.tanh(params["small"] @ some)) + 0.0 * jnp.sum(params["zero"] * some)
      return run.task.loss(frozen, rest, unit, key) + 1e-4 * branch

  extra = {"small": jnp.ones((4, 6)), "zero": jnp.ones(6)}
  return dataclasses.replace(run, task=Task(), params={**run.params, **extra})


@pytest.mark.parametrize(
  ("leaf", "broken"),
  [("small", lambda x: x[::-1]), ("small", lambda x: 1.01 * x), ("small", jnp.zeros_like),
   ("zero", lambda x: x + 1e-4), ("head.bias", lambda x: x[::-1])],
)  # fmt: skip
def test_one_wrong_parameter_is_enough(run, monkeypatch, caplog, leaf, broken):
  """Relative to itself, however small its share of the whole is."""
  run = _with_small_branch(run)
  _wrong_in(monkeypatch, leaf, broken)
  with caplog.at_level(logging.WARNING):
    assert choose_engine(run) == "loop"
  assert f"sums of {leaf} differ" in caplog.text


def test_a_small_branch_that_is_right_is_kept(run):
  assert choose_engine(_with_small_branch(run)) == "auto"


def test_the_style_of_the_run_is_compared(run, monkeypatch):
  """An engine that is wrong under automatic clipping alone."""
  original = ghost.clipped_sum

  def clipped_sum(*args):
    total, norms, losses = original(*args)
    factor = 1.0 if args[5].gamma is None else 2.0
    return jax.tree.map(lambda x: factor * x, total), norms, losses

  monkeypatch.setattr(ghost, "clipped_sum", clipped_sum)
  assert choose_engine(run) == "auto"
  privacy = dataclasses.replace(run.config.privacy, clipping="automatic")
  automatic = dataclasses.replace(run, config=dataclasses.replace(run.config, privacy=privacy))
  assert choose_engine(automatic) == "loop"


def test_units_that_vmap_mixes_are_seen(run, monkeypatch):
  """The reference takes them one at a time: were it vmap too, both would be wrong alike."""
  gradient = jax.value_and_grad

  def mixed(loss, *args, **kwargs):
    found = gradient(loss, *args, **kwargs)

    @jax.custom_batching.custom_vmap
    def one(g):
      return g

    @one.def_vmap
    def all_units(size, batched, g):
      del size
      return g.mean(0, keepdims=True) + 0 * g, batched[0]

    def mapped(*values):
      value, grads = found(*values)
      return value, jax.tree.map(one, grads)

    return mapped

  monkeypatch.setattr(jax, "value_and_grad", mixed)
  assert choose_engine(run) == "loop"


def test_what_cancels_is_noise_in_both():
  """A sum of rounding alone may differ by as much as rounding changes it, and by no more."""
  zeros = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
  one = Compensated({"a": jnp.ones(3), "b": jnp.full(3, 1e-9)}, zeros)
  other = one._replace(sum={"a": jnp.ones(3), "b": jnp.full(3, -3e-9)})
  moved = one._replace(sum={"a": jnp.ones(3), "b": jnp.full(3, 2e-9)})
  assert engine_check._of_sums(other, one, lambda: moved, 1e-7, 0.0) is None
  assert "sums of b" in engine_check._of_sums(other, one, lambda: one, 1e-7, 0.0)
