"""Before step 0 the fast engine is compared with the reference, and gives way where it is wrong."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from support import small_config

from dp_jax.gradients.ghost import engine as ghost
from dp_jax.training.engine_check import choose_engine
from dp_jax.training.prepare import prepare


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
    assert choose_engine(run) == "vmap"
  assert "disagrees" in caplog.text
  with pytest.raises(ValueError, match="disagrees with the reference"):
    choose_engine(_with_engine(run, "ghost"))


def test_the_made_up_units_say_nothing_of_the_data(run):
  units = run.task.made_up_units(3, 1)
  other = prepare(small_config(data__seed=5)).task.made_up_units(3, 1)
  jax.tree.map(np.testing.assert_array_equal, units, other)
