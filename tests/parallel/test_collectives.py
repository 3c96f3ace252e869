"""What devices say to each other, counted in the compiled programs; results on every mesh."""

import collections
import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import small_config

from dp_jax.gradients import compensated as pairs
from dp_jax.parallel import collectives
from dp_jax.parallel.mesh import build_mesh, to_host
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import loop as loop_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import build_step, init_state

KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
STEPS = 2
# One of its arrays is large enough to be cut along fsdp: the kernel of the head, 4096 x 10.
MODEL = {"kwargs": {"widths": [64], "strides": [1], "groups": 4}}
CUT = 1


@functools.cache
def _cached_loop(config):
  key = MasterKey(bytes(range(32)), is_test=True)
  return loop_module._loop(prepare(config), WorkDir(Path("unused")), key)


def _loop(mesh, **changes):
  """Two microbatches a step of 60 units or so, on average."""
  return _cached_loop(small_config(**{"mesh": mesh, "model": MODEL, **changes}))


def _state(loop):
  return init_state(loop.run.params, loop.run.optimizer, loop.run.mesh)


def _counts(function, *args):
  text = function.lower(*args).compile().as_text()
  return dict(collections.Counter(re.findall(rf" ({KINDS})(?:-start)?\(", text)))


def _collectives(loop):
  """Counts in accumulate, finish, and both in one call."""
  state, key = _state(loop), jax.random.key(0)
  (units, mask, ids), *_ = loop._microbatches(np.arange(20))
  total, frozen = loop.functions.zeros(state.params), loop.run.frozen
  return (
    _counts(loop.functions.accumulate, state.params, frozen, total, units, mask, ids, key),
    _counts(loop.functions.finish, state, total, key),
  )


@pytest.mark.parametrize(
  ("devices", "engine"), [(1, "ghost"), (2, "ghost"), (4, "ghost"), (8, "ghost"), (8, "vmap")]
)
def test_under_data_parallelism_devices_meet_once_a_step(devices, engine):
  accumulate, finish = _collectives(_loop(f"data:{devices}", train__engine=engine))
  assert accumulate == {}
  assert finish == ({} if devices == 1 else {"all-reduce": 1})


def test_one_call_for_both_halves_meets_once_too():
  loop = _loop("data:8")
  (units, mask, ids), *_ = loop._microbatches(np.arange(20))
  key = jax.random.key(0)
  args = (_state(loop), loop.run.frozen, units, mask, ids, key, key)
  assert _counts(loop.functions.whole, *args) == {"all-reduce": 1}


@pytest.mark.parametrize("mesh", ["data:4,fsdp:2", "fsdp:8"])
def test_under_fsdp_only_what_the_parameters_need(mesh):
  """A gather before and a scatter after each microbatch for every array that is cut; in a step one
  all-reduce of these and one of the others."""
  accumulate, finish = _collectives(_loop(mesh, train__optimizer="adam"))
  assert accumulate == {"all-gather": CUT, "all-to-all": CUT}
  assert finish == {"all-reduce": 2}


def test_a_sum_over_devices_in_each_microbatch_is_caught():
  """The broken variant: jit divides the work, and XLA sums over devices in `accumulate`."""
  loop = _loop("data:8")
  (units, mask, _), *_ = loop._microbatches(np.arange(20))

  def accumulate(params, units, mask):
    def loss(params, unit):
      return loop.run.task.loss({}, params, unit, None)

    grads = jax.vmap(jax.grad(loss), (None, 0))(params, units)
    return jax.tree.map(lambda g: jnp.tensordot(mask.astype(jnp.float32), g, 1), grads)

  assert _counts(jax.jit(accumulate), _state(loop).params, units, mask) != {}


@functools.cache
def _trained(mesh, **changes):
  loop = _loop(mesh, **changes)
  state, moved = _state(loop), []
  for step in range(STEPS):
    state = loop.step(state, step)
    moved.append(to_host(state.params))
  seen = [piece for pending in loop.log._pending for piece in to_host(pending.pieces)]
  norms = [aux.norms[mask] for aux, mask in seen]
  return moved, np.concatenate(norms), state


@pytest.mark.parametrize(("mesh", "optimizer"), [
  ("data:2", "sgd"), ("data:4", "sgd"), ("data:8", "sgd"), ("data:3", "sgd"),
  ("data:2,fsdp:4", "sgd"), ("data:4,fsdp:2", "lamb"),
])  # fmt: skip
def test_the_mesh_changes_the_result_by_rounding_alone(mesh, optimizer):
  expected, norms, _ = _trained("data:1", train__optimizer=optimizer)
  found, same_norms, state = _trained(mesh, train__optimizer=optimizer)
  np.testing.assert_allclose(same_norms, norms, rtol=1e-5)
  for here, there in zip(found, expected, strict=True):
    for name, value in there.items():
      # LAMB divides by what it has seen of the noised gradient, which lies on a grid.
      atol = 1e-6 if optimizer == "sgd" else 1e-5
      np.testing.assert_allclose(here[name], value, rtol=1e-6, atol=atol, err_msg=name)
  cut = [name for name, x in state.params.items() if not x.sharding.is_fully_replicated]
  assert len(cut) == (CUT if "fsdp" in mesh else 0)
  for name in cut:  # one rule for all that has the shape of the parameter
    assert state.average[name].sharding == state.params[name].sharding
  like = {x.shape: x.sharding for x in state.params.values()}
  assert all(
    x.sharding == like[x.shape] for x in jax.tree.leaves(state.opt_state) if x.shape in like
  )


@pytest.mark.parametrize("mesh", ["data:8", "data:2,fsdp:4"])
def test_without_privacy_too(mesh):
  plain = {"privacy__enabled": False, "privacy__epsilon": None, "privacy__delta": None}
  expected, _, _ = _trained("data:1", **plain)
  found, _, _ = _trained(mesh, **plain)
  for name, value in expected[-1].items():
    np.testing.assert_allclose(found[-1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


DIM, CLIP_NORM = 4096, 0.97


def _linear(frozen, params, unit, key):
  """The gradient of a unit is the unit."""
  del frozen, key
  return jnp.dot(params, unit)


def _moved(mesh, monkeypatch=None):
  """How far removing one of 2^16 aligned units moves the pair that the noise is added to.

  Each device has a sum of 2^13 units and more; those after the removed one move to other devices.
  """
  mesh = build_mesh(mesh)
  step = build_step(
    _linear, optax.sgd(1.0), clip_norm=CLIP_NORM, stddev=1.0, expected_batch_size=1.0, ema=0.0,
    engine="vmap", mesh=mesh,
  )  # fmt: skip
  params = jnp.zeros(DIM)
  combine = jax.jit(lambda total: collectives.combined(total, params, mesh, CLIP_NORM))
  sizes = np.random.default_rng(0).uniform(0.2, 1, 2**16).astype(np.float32)

  def total(sizes):
    spread = step.zeros(params)
    sizes = np.pad(sizes, (0, 2**16 - len(sizes)))
    for part in np.split(sizes, 2**8):
      units = np.zeros((len(part), DIM), np.float32)
      units[:, 0] = part
      ids = np.zeros(len(part), np.uint32)
      spread, _ = step.accumulate(
        params, {}, spread, units, np.ones(len(part), bool), ids, jax.random.key(0)
      )
    pair = combine(spread)
    return np.asarray(pair.sum, np.float64) + np.asarray(pair.error, np.float64)

  removed = 2**15
  found = np.linalg.norm(total(sizes) - total(np.delete(sizes, removed)))
  return found, min(float(sizes[removed]), CLIP_NORM * (1 - 2**-10))


@pytest.mark.parametrize("mesh", ["data:8", "data:4,fsdp:2"])
def test_one_unit_moves_the_sum_over_devices_by_no_more_than_itself(mesh):
  found, size = _moved(mesh)
  assert abs(found - size) < 1e-6


def test_a_plain_all_reduce_is_caught(monkeypatch):
  """P1, P17: the float32 sums of devices round in another way when units move between them."""

  def plain(total, params, mesh, clip_norm):
    whole = jax.tree.map(lambda x: jnp.sum(x, axis=0), pairs.collapse(total))
    return pairs.Compensated(whole, jax.tree.map(jnp.zeros_like, whole))

  monkeypatch.setattr(collectives, "combined", plain)
  found, size = _moved("data:8")
  assert abs(found - size) > 1e-4


class Repeated:
  """A data set in which every unit is one of the first 20: the host keeps indices alone."""

  def __init__(self, loader, live):
    self._loader, self._live = loader, live

  def load(self, indices, size):
    self._live.append(sum(x.nbytes for x in jax.live_arrays()))
    return self._loader.load(indices % 20, size)


def _live_bytes(loop, num_units):
  """Bytes on the devices before each microbatch of a step of so many units."""
  live: list[int] = []
  run = dataclasses.replace(loop.run, loader=Repeated(loop.run.loader, live))
  sampler = dataclasses.replace(
    loop.sampler, num_units=num_units, indices=lambda step: np.arange(num_units)
  )
  state = _state(loop)
  dataclasses.replace(loop, run=run, sampler=sampler).step(state, 0)
  loop.log._pending.clear()
  return live


def test_memory_does_not_grow_with_the_batch(monkeypatch):
  """No call sees more than one microbatch; the sum is reused in place; no more wait than two."""
  loop = _loop("data:2", model={"name": "linear"}, train__microbatch_size=512)
  small, large = (_live_bytes(loop, 512 * count) for count in (8, 64))
  assert len(small) == 8 and len(large) == 64
  assert max(large) - large[0] == max(small) - small[0]
  monkeypatch.setattr(loop_module, "_AHEAD", 64)  # the broken variant: nothing is waited for
  broken = _live_bytes(loop, 512 * 64)
  assert max(broken) - broken[0] > 3 * (max(large) - large[0])


def test_the_sum_is_reused_in_place_and_each_device_has_one():
  loop = _loop("data:2")
  state, key = _state(loop), jax.random.key(0)
  (units, mask, ids), *_ = loop._microbatches(np.arange(20))
  args = (state.params, loop.run.frozen, loop.functions.zeros(state.params), units, mask, ids, key)
  analysis = loop.functions.accumulate.lower(*args).compile().memory_analysis()
  assert analysis.alias_size_in_bytes == 2 * 4 * sum(x.size for x in state.params.values())
