"""Noise that keeps a state, through a run: in each step, over a crash, and gone at the end."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import key_file, small_config
from two_bands import two_bands

from dp_jax.gradients.noise.transform import independent
from dp_jax.parallel.mesh import build_mesh
from dp_jax.training import loop
from dp_jax.training import run as run_module
from dp_jax.training.checkpoints.checkpoint import Checkpoints, delete_keys
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import build_step, init_state

STATE = "release/params.safetensors"
DIM, STDDEV, BETA = 2**13, 1.5, 0.5
GRID = 2.0**-14 * STDDEV


def _zero_loss(frozen, params, unit, key):
  del frozen, key
  return 0.0 * jnp.sum(params["w"]) * unit["x"]


def _noise_of_steps(noise, mesh="data:1"):
  """What each of three steps adds to a sum of nothing, and the state after them."""
  mesh, optimizer = build_mesh(mesh), optax.sgd(1.0)
  functions = build_step(
    _zero_loss, optimizer, clip_norm=1.0, stddev=STDDEV, expected_batch_size=1.0, ema=0.0,
    mesh=mesh, noise=noise,
  )  # fmt: skip
  state, added = init_state({"w": jnp.zeros(DIM)}, optimizer, mesh, noise(STDDEV)), []
  for step in range(3):
    before = np.asarray(state.params["w"], np.float64)
    state = functions.finish(state, functions.zeros(state.params), jax.random.key(step))
    added.append(before - np.asarray(state.params["w"], np.float64))
  return added, state


@pytest.mark.parametrize("mesh", ["data:1", "data:4,fsdp:2"])
def test_each_step_has_its_noise_and_some_of_the_last(mesh):
  added, state = _noise_of_steps(two_bands(BETA), mesh)
  fresh, plain = _noise_of_steps(independent)
  assert plain.noise == ()
  np.testing.assert_allclose(added[0], fresh[0], atol=2 * GRID)
  for step in (1, 2):
    expected = fresh[step] + BETA * fresh[step - 1]
    np.testing.assert_allclose(added[step], expected, atol=2 * GRID)
  np.testing.assert_allclose(state.noise["w"], fresh[2], atol=2 * GRID)
  assert state.noise["w"].sharding == state.params["w"].sharding  # placed as the parameter is
  assert state.params["w"].sharding.is_fully_replicated == ("fsdp" not in mesh)


class Crash(BaseException):
  """Stands for a process that ends at once."""


CONFIG = small_config(model={"name": "linear"}, train__steps=4, train__engine="vmap")


def _train(folder, noise, crash_at=None, **patches):
  """The run with this noise; no configuration names one."""
  original = loop.Loop.step

  def step(self, state, index):
    if index == crash_at:
      raise Crash
    return original(self, state, index)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      run_module, "prepare", lambda *args: dataclasses.replace(prepare(*args), noise=noise)
    )
    patch.setattr(loop.Loop, "step", step)
    for name, value in patches.items():
      patch.setattr(run_module, name, value)
    run_module.train(CONFIG, folder, test_key_file=key_file(folder.parent), progress=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed") / "run"
  _train(folder, two_bands(BETA))
  return folder


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
  """Ended after 3 of 4 steps; its last checkpoint is of step 2."""
  folder = tmp_path_factory.mktemp("crashed") / "run"
  with pytest.raises(Crash):
    _train(folder, two_bands(BETA), crash_at=3)
  return folder


@pytest.fixture
def copy(crashed, tmp_path):
  return shutil.copytree(crashed, tmp_path / "run")


def _secrets(folder):
  return [p for p in folder.rglob("*") if "noise" in p.name or "keys" in p.name]


def _damage(folder):
  largest = max((folder / "2" / "noise").rglob("*"), key=lambda p: p.is_file() * p.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(bytes(content))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_run_goes_on_with_its_noise_bit_for_bit(undisturbed, copy, damaged, caplog):
  if damaged:  # then from the checkpoint before
    _damage(copy / "checkpoints")
  _train(copy, two_bands(BETA))
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()
  assert ("checkpoint of step 2 cannot be read" in caplog.text) == damaged


def test_a_state_that_is_not_restored_shows(undisturbed, copy, monkeypatch):
  """The broken variant: the noise begins anew."""
  read = Checkpoints._read_state

  def forgetful(self, step, like):
    state, key = read(self, step, like)
    return state._replace(noise=like.noise), key

  monkeypatch.setattr(Checkpoints, "_read_state", forgetful)
  _train(copy, two_bands(BETA))
  assert (copy / STATE).read_bytes() != (undisturbed / STATE).read_bytes()


def test_the_state_is_a_secret_item_and_gone_at_the_end(crashed, undisturbed):
  saved = crashed / "checkpoints" / "2"
  assert (saved / "noise").is_dir() and (saved / "keys").is_dir()
  names = {name: (saved / name / "_METADATA").read_text() for name in ("state", "noise")}
  assert "noise" in names["noise"] and "noise" not in names["state"]
  # A checksum of what is secret is secret.
  about = json.loads((saved / "about" / "metadata").read_text())
  run = prepare(CONFIG)
  state = init_state(run.params, run.optimizer)
  assert len(about["sums"]) == len(jax.tree.leaves(state))
  assert not _secrets(undisturbed)


@pytest.mark.parametrize("first", ["keys", "noise"])
def test_a_run_killed_while_its_secrets_are_deleted_goes_on(undisturbed, copy, first):
  def half(path):
    for item in path.glob(f"*/{first}"):
      shutil.rmtree(item)
    raise Crash

  with pytest.raises(Crash):
    _train(copy, two_bands(BETA), delete_keys=half)
  assert _secrets(copy) and not (copy / "release").exists()
  _train(copy, two_bands(BETA), delete_keys=delete_keys)
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()
  assert not _secrets(copy)


@pytest.mark.parametrize(("noise", "named"), [
  (two_bands(0.25), "noise was"), (independent, "noise"),
])  # fmt: skip
def test_a_run_does_not_go_on_with_other_noise(copy, noise, named):
  with pytest.raises(ValueError, match=f"of another run: {named}"):
    _train(copy, noise)
