"""A run whose microbatches are loaded ahead ends with the same parameters, bit for bit."""

import jax
import numpy as np
import pytest
from support import small_config

from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import init_state

STEPS = range(5)


def _loop(tmp_path, **changes):
  folder = WorkDir(tmp_path)
  folder.private.mkdir(exist_ok=True)
  run = prepare(small_config(train__engine="vmap", **changes))
  return loop_module._loop(run, folder, MasterKey(bytes(range(32))))


def _train(loop):
  state = init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)
  with loop.loading_ahead(STEPS) as ahead:
    assert (ahead.pipeline is None) == (not loop.run.config.data.workers)
    for step in STEPS:
      state = ahead.step(state, step)
  return state


def test_loading_ahead_changes_no_bit(tmp_path):
  expected = _train(_loop(tmp_path))  # of a source in memory: without threads
  for workers, prefetch in ((1, 1), (3, None)):
    loop = _loop(tmp_path, data__workers=workers, data__prefetch=prefetch)
    jax.tree.map(np.testing.assert_array_equal, expected, _train(loop))


def test_a_malformed_record_stops_a_strict_run(tmp_path, monkeypatch):
  loop = _loop(tmp_path, data__workers=2)

  def refuses(indices, size):
    raise ValueError("record 7 of digits/train: label 12 is outside 0..9")

  monkeypatch.setattr(loop.run.loader, "load", refuses)
  with pytest.raises(ValueError, match="record 7 of digits/train"):
    _train(loop)


def test_views_do_not_depend_on_the_microbatch(tmp_path):
  changes = {"data__augment": "pad_mirror_crop_flip", "data__views": 2}
  states = []
  for size in (32, 96):
    loop = _loop(tmp_path, **changes, train={"steps": 8, "microbatch_size": size, "engine": "vmap"})
    state = init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)
    states.append(loop.step(loop.step(state, 0), 1))
  with jax.transfer_guard("allow"):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), states[0].params, states[1].params
    )
