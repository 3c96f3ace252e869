"""A run whose first step is the closed form of a zero head, and LAMB on a full batch."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support import key_file, lines, small_config

from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.models.pretrained import weights
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training import zero_head
from dp_jax.training.checkpoints.run_key import environment, for_environment
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import build_step
from dp_jax.training.zero_head import head_at_zero, sum_at_zero


def _config(**changes):
  defaults: dict = {
    "model": {"name": "linear", "head_init_std": 0.0},
    "privacy": {"epsilon": 4.0, "delta": 1e-3, "sampling": "full_batch", "clip_norm": 1.5},
    "train": {"steps": 1, "learning_rate": 0.5, "microbatch_size": 64},
  }
  return small_config(**{**defaults, **changes})


def _parameters(result):
  return weights.load(Path(result.workdir) / "release" / "params.safetensors")[1]


def _exact(pair):
  return np.concatenate([np.add(pair.sum[k], pair.error[k], dtype=float).ravel() for k in pair.sum])


def test_the_sum_of_a_run_is_the_general_paths():
  run = prepare(_config())
  indices = np.arange(run.loader.num_units)
  total, seen = sum_at_zero(run, head_at_zero(run), indices)
  step = build_step(
    run.task.loss, run.optimizer, clip_norm=1.5, stddev=1.0,
    expected_batch_size=run.expected_batch_size, ema=0.0, engine="vmap",
  )  # fmt: skip
  units, mask = run.loader.load(indices, len(indices))
  ids = indices.astype(np.uint32)
  zero = step.zeros(run.params)
  expected, aux = step.accumulate(run.params, {}, zero, units, mask, ids, jax.random.key(0))
  want = _exact(expected)
  assert np.linalg.norm(_exact(total) - want) <= 3e-7 * np.linalg.norm(want)
  np.testing.assert_allclose(np.concatenate([a.norms for a, _ in seen]), aux.norms, rtol=1e-6)


def test_a_run_from_zero_uses_it_and_gives_what_the_general_path_gives(tmp_path, monkeypatch):
  calls = []

  def counted(*arguments):
    calls.append(arguments)
    return sum_at_zero(*arguments)

  monkeypatch.setattr("dp_jax.training.loop.sum_at_zero", counted)
  key = key_file(tmp_path)
  released = {}
  for engine in ("auto", "vmap"):
    config = _config(train__engine=engine)
    result = train(config, tmp_path / engine, test_key_file=key, progress=False)
    released[engine] = _parameters(result)
    log = lines(tmp_path / engine / "private" / "training.jsonl")
    assert len(log) == 1 and log[0]["loss"] == pytest.approx(np.log(10), rel=1e-6)
  assert len(calls) == 1
  for name, value in released["auto"].items():
    np.testing.assert_allclose(value, released["vmap"][name], atol=1e-4)
  statement = json.loads((tmp_path / "auto" / "release" / "privacy.json").read_text())
  assert statement["accountant"] == "analytic_gaussian" and statement["steps"] == 1


@pytest.mark.parametrize("changes", [
  {"model": {"name": "linear", "head_init_std": 1e-3}},
  {"privacy": {"epsilon": 4.0, "delta": 1e-3, "sampling_rate": 0.5}},
  {"privacy": {"enabled": False, "sampling": "full_batch"}},
  {"model": {"kwargs": {"widths": [8], "strides": [2], "groups": 2}, "head_init_std": 0.0}},
], ids=["init", "poisson", "plain", "convnet"])  # fmt: skip
def test_other_runs_do_not(changes):
  assert head_at_zero(prepare(_config(**changes))) is None


def test_pieces_of_another_size_give_the_same_sum(monkeypatch):
  run = prepare(_config())
  head, indices = head_at_zero(run), np.arange(run.loader.num_units)
  whole, _ = sum_at_zero(run, head, indices)
  monkeypatch.setattr(zero_head, "_BYTES", 7 * 4 * head.num_features)
  parts, seen = sum_at_zero(run, head, indices)
  assert len(seen) == -(-len(indices) // 7)
  np.testing.assert_allclose(_exact(parts), _exact(whole), atol=1e-5)  # float32, of up to 64 units


def test_a_full_batch_step_of_lamb_is_optaxs_on_the_same_noised_gradient(tmp_path):
  key = key_file(tmp_path)
  config = _config(model__head_init_std=1e-3, train__optimizer="lamb", train__engine="vmap")
  result = train(config, tmp_path / "run", test_key_file=key, progress=False)
  run = prepare(config)
  here = for_environment(MasterKey.from_file(key), environment())
  step = build_step(
    run.task.loss, run.optimizer, clip_norm=1.5, stddev=1.0,
    expected_batch_size=run.expected_batch_size, ema=0.0, engine="vmap",
  )  # fmt: skip
  indices = np.arange(run.loader.num_units)
  units, mask = run.loader.load(indices, len(indices))
  total, _ = step.accumulate(
    run.params, {}, step.zeros(run.params), units, mask, indices.astype(np.uint32),
    step_key(here, "unit", 0),
  )  # fmt: skip
  total = jax.tree.map(lambda x: x[0], total)  # of the one device
  noised = add_noise(total, run.mechanism.stddev, step_key(here, "noise", 0))
  mean = jax.tree.map(lambda x: x / run.expected_batch_size, noised)
  lamb = optax.lamb(0.5)
  updates, _ = lamb.update(mean, lamb.init(run.params), run.params)
  expected = optax.apply_updates(run.params, updates)
  for name, value in _parameters(result).items():
    np.testing.assert_allclose(value, expected[name], atol=2e-4)
