"""A step in one call is the step in two, bit for bit, and follows the configuration's clipping."""

import dataclasses

import jax
import numpy as np
import pytest
from support import small_config

from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import init_state

STEPS = 3


def _loop(tmp_path, **changes):
  folder = WorkDir(tmp_path)
  folder.private.mkdir(exist_ok=True)
  run = prepare(small_config(train__engine="vmap", **changes))
  return loop_module._loop(run, folder, MasterKey(bytes(range(32))))


def _train(loop):
  state = init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)
  for step in range(STEPS):
    state = loop.step(state, step)
  return state


def _with(loop, **functions):
  return dataclasses.replace(loop, functions=loop.functions._replace(**functions))


def _not_called(*args):
  raise AssertionError("this half of the step was not to be called")


def test_one_call_gives_what_two_give(tmp_path):
  config = small_config(train__engine="vmap")
  train = {**config.to_dict()["train"], "microbatch_size": 128}
  one = _loop(tmp_path, train=train)
  in_one_call = _train(_with(one, accumulate=_not_called, finish=_not_called))

  def in_two(state, frozen, units, mask, ids, unit_key, noise_key):
    zero = one.functions.zeros(state.params)
    total, aux = one.functions.accumulate(state.params, frozen, zero, units, mask, ids, unit_key)
    return one.functions.finish(state, total, noise_key), aux

  in_two_calls = _train(_with(one, whole=in_two))
  jax.tree.map(np.testing.assert_array_equal, in_one_call, in_two_calls)


def test_several_microbatches_and_an_empty_batch_take_two_calls(tmp_path):
  loop = _with(_loop(tmp_path), whole=_not_called)
  assert loop.run.expected_batch_size > loop.run.config.train.microbatch_size
  _train(loop)
  nothing = dataclasses.replace(loop.sampler, indices=lambda step: np.zeros(0, np.int64))
  _train(dataclasses.replace(loop, sampler=nothing))


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_the_clipping_of_the_configuration_is_what_runs(tmp_path, clipping):
  """Of gradients with norms below C, automatic clipping makes more."""
  loop = _loop(tmp_path, privacy__clip_norm=100.0, privacy__clipping=clipping)
  state = init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)
  (units, mask, ids), *_ = loop._microbatches(np.arange(8))
  total, aux = loop.functions.accumulate(
    state.params, loop.run.frozen, loop.functions.zeros(state.params), units, mask, ids,
    jax.random.key(0),
  )  # fmt: skip
  assert float(np.max(aux.norms)) < 50
  norm = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(total.sum)))
  assert (norm > 100) == (clipping == "automatic")
