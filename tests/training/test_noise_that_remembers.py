"""Noise with a state goes through a run: restored bit for bit, and kept as secret as the key."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from correlated_noise import two_bands
from safetensors.numpy import load_file
from support import key_file, small_config

from dp_jax.parallel.mesh import build_mesh
from dp_jax.parallel.stopping import Stopped
from dp_jax.training import run as run_module
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import init_state


@pytest.fixture(scope="module", name="runs")
def _runs(tmp_path_factory):
  """A run that goes through, and one that is stopped after five of eight steps and goes on."""
  folder = tmp_path_factory.mktemp("runs")
  config, key = small_config(), key_file(folder)

  def prepared(config, *given):
    run = prepare(config, *given)
    return dataclasses.replace(run, noise=two_bands(run.mechanism.stddev))

  def train(workdir, patch):
    patch.setattr(run_module, "prepare", prepared)
    return run_module.train(config, workdir, test_key_file=key, progress=False)

  with pytest.MonkeyPatch.context() as patch:
    train(folder / "whole", patch)
    original, count = run_module.run_steps.__globals__["Loop"].step, iter(range(100))

    def step(self, state, index):
      if next(count) == 5:
        signal.raise_signal(signal.SIGTERM)
      return original(self, state, index)

    patch.setattr(run_module.run_steps.__globals__["Loop"], "step", step)
    with pytest.raises(Stopped):
      train(folder / "stopped", patch)
    kept = sorted(path.parent.name for path in (folder / "stopped" / "checkpoints").glob("*/noise"))
    modes = {p.stat().st_mode & 0o077 for p in (folder / "stopped" / "checkpoints").rglob("*")}
    train(folder / "stopped", patch)
  return folder, kept, modes


def test_it_is_restored_bit_for_bit(runs):
  folder, kept, modes = runs
  assert kept and modes == {0}  # what is remembered is on disk, for its owner alone
  whole, stopped = (
    load_file(folder / name / "release" / "params.safetensors") for name in ("whole", "stopped")
  )
  for name, value in whole.items():
    np.testing.assert_array_equal(value, stopped[name])


def test_nothing_of_it_is_left_when_the_run_is_done(runs):
  folder, _, _ = runs
  for name in ("whole", "stopped"):
    assert not list((folder / name / "checkpoints").rglob("*noise*"))
    assert not list((folder / name / "checkpoints").glob(".removed*"))
    files = {path.name for path in (folder / name / "release").iterdir()}
    assert files == {"params.safetensors", "privacy.json", "model_card.md", "manifest.json"}


def test_without_its_state_a_resume_would_differ(runs, tmp_path):
  """The broken variant: noise that forgets at a restart gives other parameters."""
  config = small_config()
  run = prepare(config)
  noise = two_bands(run.mechanism.stddev)
  zeros = {name: np.zeros_like(x) for name, x in run.params.items()}
  _, after = noise.update(zeros, noise.init(zeros), jax.random.key(0))
  second, _ = noise.update(zeros, after, jax.random.key(1))
  forgotten, _ = noise.update(zeros, noise.init(zeros), jax.random.key(1))
  assert any(np.any(second[name] != forgotten[name]) for name in zeros)


def test_it_is_cut_over_devices_like_the_parameters():
  run = prepare(small_config())
  mesh = build_mesh("data:2,fsdp:4")
  state = init_state(run.params, run.optimizer, mesh, two_bands(1.0))
  for name, value in state.params.items():
    assert state.noise[name].sharding == value.sharding
