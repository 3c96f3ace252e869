"""Before step 0 the fast engine is compared with the reference, and gives way where it is wrong."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from support import small_config

from dp_jax.gradients.ghost import rules
from dp_jax.training.engine_check import choose_engine
from dp_jax.training.prepare import prepare


@pytest.fixture(scope="module")
def run():
  return prepare(small_config())


def _with_engine(run, engine):
  train = dataclasses.replace(run.config.train, engine=engine)
  return dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))


def _norms_too_small(monkeypatch):
  original = rules.norms
  monkeypatch.setattr(rules, "norms", lambda c: 0.25 * original(c))


def _sums_scaled_twice(monkeypatch):
  original = rules.clipped_sum
  monkeypatch.setattr(rules, "clipped_sum", lambda c, scales: 2 * original(c, scales))


def test_a_right_engine_is_kept(run):
  assert choose_engine(run) == "auto"
  assert choose_engine(_with_engine(run, "ghost")) == "ghost"
  assert choose_engine(_with_engine(run, "vmap")) == "vmap"


@pytest.mark.parametrize("broken", [_norms_too_small, _sums_scaled_twice])
def test_a_wrong_engine_gives_way_with_a_warning(run, monkeypatch, caplog, broken):
  broken(monkeypatch)
  with caplog.at_level(logging.WARNING):
    assert choose_engine(run) == "vmap"
  assert "disagrees" in caplog.text
  with pytest.raises(ValueError, match="disagrees with the reference"):
    choose_engine(_with_engine(run, "ghost"))


def test_the_made_up_units_say_nothing_of_the_data(run):
  units = run.task.made_up_units(3, 1)
  other = prepare(small_config(data__seed=5)).task.made_up_units(3, 1)
  jax.tree.map(np.testing.assert_array_equal, units, other)
