"""A killed run goes on bit for bit; a changed one is refused."""

import itertools
import json
import os
import shutil
import time

import jax
import numpy as np
import pytest
from support import STEPS, key_file, lines, small_config

from dp_jax.training import loop
from dp_jax.training.checkpoints import run_key as keys_module
from dp_jax.training.checkpoints.checkpoint import delete_keys
from dp_jax.training.checkpoints.run_key import environment
from dp_jax.training.run import train

STATE = "release/params.safetensors"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """A completed run with the fixed key."""
  folder = tmp_path_factory.mktemp("undisturbed")
  train(small_config(), folder / "run", test_key_file=key_file(folder), progress=False)
  return folder / "run"


class Crash(BaseException):
  """Stands for a process that ends at once."""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
  """The folder of the same run, ended after 5 of its 8 steps; its last checkpoint is of step 4."""
  folder = tmp_path_factory.mktemp("crashed")
  original = loop.Loop.step

  def step(self, state, index):
    if index == 5:
      raise Crash
    return original(self, state, index)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.Loop, "step", step)
    with pytest.raises(Crash):
      train(small_config(), folder / "run", test_key_file=key_file(folder), progress=False)
  return folder / "run"


@pytest.fixture
def copy(crashed, tmp_path):
  return shutil.copytree(crashed, tmp_path / "run")


def test_a_crash_between_checkpoints_changes_nothing(undisturbed, copy, tmp_path):
  train(small_config(), copy, test_key_file=key_file(tmp_path), progress=False)
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()
  for name in ("privacy.json", "model_card.md"):
    assert (copy / "release" / name).read_text() == (undisturbed / "release" / name).read_text()


def test_a_half_written_checkpoint_is_ignored(undisturbed, copy, tmp_path):
  newest = max(
    (p for p in (copy / "checkpoints").iterdir() if p.name.isdigit()), key=lambda p: int(p.name)
  )
  partial = copy / "checkpoints" / f"6.orbax-checkpoint-tmp-{time.time_ns()}"
  shutil.copytree(newest, partial)
  (partial / "commit_success.txt").unlink(missing_ok=True)
  train(small_config(), copy, test_key_file=key_file(tmp_path), progress=False)
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()


def test_the_key_in_the_checkpoint_is_used_and_then_deleted(copy, tmp_path):
  keys = list((copy / "checkpoints").glob("*/keys"))
  assert keys
  train(small_config(), copy, progress=False)  # without the key file
  assert json.loads((copy / "release/privacy.json").read_text())["randomness"]["test_key"] is True
  assert not list((copy / "checkpoints").glob("*/keys"))


def test_a_completed_run_prints_its_result_and_trains_nothing(undisturbed, monkeypatch):
  monkeypatch.setattr(loop.Loop, "step", lambda *_: pytest.fail("trained again"))
  before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*") if p.is_file()}
  result = train(small_config(), undisturbed, progress=False)
  assert result.steps == STEPS and result.epsilon <= 4.0
  after = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*") if p.is_file()}
  assert {p: t for p, t in after.items() if p.name != ".lock"} == {
    p: t for p, t in before.items() if p.name != ".lock"
  }


@pytest.mark.parametrize(("change", "named"), [
  ({"privacy__clip_norm": 2.0}, "privacy.clip_norm was 1.0, is 2.0"),
  ({"privacy__epsilon": 3.0}, "privacy.epsilon was 4.0, is 3.0"),
  ({"privacy__sampling_rate": 0.2}, "privacy.sampling_rate was 0.3, is 0.2"),
  ({"model__kwargs": {"widths": [4], "strides": [2], "groups": 2}},
   "model.kwargs.widths was [8], is [4]"),
  ({"data__num_records": 150}, "data.num_records was 200, is 150"),
  ({"seed": 1}, "seed was 0, is 1"),
  ({"train__learning_rate": 0.2}, "train.learning_rate was 0.1, is 0.2"),
])  # fmt: skip
def test_a_changed_run_is_refused_and_the_difference_named(copy, tmp_path, change, named):
  before = sorted((p, p.stat().st_mtime_ns) for p in copy.rglob("*") if p.name != ".lock")
  with pytest.raises(ValueError) as error:
    train(small_config(**change), copy, test_key_file=key_file(tmp_path), progress=False)
  assert named in str(error.value)
  assert before == sorted((p, p.stat().st_mtime_ns) for p in copy.rglob("*") if p.name != ".lock")


def test_changed_records_under_the_same_configuration_are_refused(copy, monkeypatch):
  from dp_jax.data.sources.source import Head

  monkeypatch.setattr(Head, "fingerprint", lambda self: "other records")
  with pytest.raises(ValueError, match="the records differ") as error:
    train(small_config(), copy, progress=False)
  assert "other records" not in str(error.value)  # a digest of private records is one of them


def test_what_changes_no_result_may_change(copy, undisturbed, tmp_path):
  config = small_config(checkpoint={"every": 3, "keep": 1}, eval={"every": 3})
  train(config, copy, test_key_file=key_file(tmp_path), progress=False)
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()
  assert [entry["step"] for entry in lines(copy / "metrics.jsonl")] == [6, STEPS]


def test_other_software_goes_on_with_fresh_keys(tmp_path, monkeypatch):
  """A secret key: the same step on other software draws other noise and other units."""
  seen = {}
  for name in ("here", "elsewhere"):
    monkeypatch.setattr(loop, "environment", lambda name=name: name)
    original = loop.Loop.step

    def step(self, state, index, original=original, name=name):
      seen.setdefault(name, []).append(self.sampler.indices(index))
      if name == "here" and index == 5:
        raise Crash
      return original(self, state, index)

    with monkeypatch.context() as patch:
      patch.setattr(loop.Loop, "step", step)
      if name == "here":
        with pytest.raises(Crash):
          train(small_config(), tmp_path / "run", progress=False)
      else:
        train(small_config(), tmp_path / "run", progress=False)
  repeated_here, repeated_elsewhere = seen["here"][4:6], seen["elsewhere"][:2]
  assert not any(
    np.array_equal(a, b) for a, b in zip(repeated_here, repeated_elsewhere, strict=True)
  )


@pytest.mark.parametrize("changed", [False, True])
def test_changed_source_is_told_and_has_fresh_keys(copy, changed, monkeypatch, caplog):
  """The version of a development tree stays the same when its source is changed."""
  before = environment()
  if changed:
    monkeypatch.setattr(keys_module, "code_version", lambda: "dp_jax 0.1.0, source changed")
  train(small_config(), copy, progress=False)
  assert (environment() != before) == changed
  assert ("than goes on from it (source changed)" in caplog.text) == changed, caplog.text


def test_frozen_values_made_by_another_generator_are_refused(copy, monkeypatch):
  """Frozen arrays are not in the checkpoint: each process makes them anew from the seed."""
  from dp_jax.models.build import ModelSpec

  build = ModelSpec.build
  monkeypatch.setattr(ModelSpec, "build", lambda self, seed: build(self, seed + 1))
  with pytest.raises(ValueError, match="model_digest"):
    train(small_config(), copy, progress=False)


def test_the_default_generator_of_a_process_changes_no_initial_value():
  from dp_jax.models.functional import split
  from dp_jax.training.setup.prepare import prepare

  here = prepare(small_config())
  with jax.default_prng_impl("rbg"):
    there = prepare(small_config())
  assert here.fingerprint() == there.fingerprint()
  assert split(here.task.spec.build(0))[1].keys() == here.params.keys()


def test_keys_are_gone_before_anything_is_released(copy, tmp_path, monkeypatch):
  from dp_jax.training import run

  def killed(*_):
    raise Crash

  with monkeypatch.context() as patch:
    patch.setattr(run, "write_parameters", killed)
    with pytest.raises(Crash):
      train(small_config(), copy, test_key_file=key_file(tmp_path), progress=False)
  assert not list((copy / "checkpoints").glob("*/keys"))
  assert train(small_config(), copy, progress=False).statement.startswith("Not private")


@pytest.mark.parametrize("kill_at", range(4))
def test_a_run_killed_while_its_keys_are_deleted_goes_on(undisturbed, copy, kill_at, monkeypatch):
  """Half of a key may be gone: what is saved of the last step is read all the same."""
  calls = itertools.count()

  def killed(name):
    original = getattr(os, name)

    def call(*args, **kwargs):
      if next(calls) == kill_at:
        raise KeyboardInterrupt
      return original(*args, **kwargs)

    return call

  def delete(path):
    with pytest.MonkeyPatch.context() as patch:
      for name in ("unlink", "rmdir", "rename"):
        patch.setattr(os, name, killed(name))
      delete_keys(path)

  with monkeypatch.context() as patch:
    patch.setattr("dp_jax.training.run.delete_keys", delete)
    with pytest.raises(KeyboardInterrupt):
      train(small_config(), copy, progress=False)
  train(small_config(), copy, progress=False)
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()
  assert not list((copy / "checkpoints").rglob("*keys*"))


def test_half_of_a_key_after_the_last_step_is_no_damage(undisturbed, copy, monkeypatch):
  """As a version left it that removed keys in place."""

  def half(path):
    for keys in path.glob("*/keys"):
      (keys / "metadata").unlink()
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr("dp_jax.training.run.delete_keys", half)
    with pytest.raises(KeyboardInterrupt):
      train(small_config(), copy, progress=False)
  train(small_config(), copy, progress=False)
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()


def test_a_run_killed_while_it_completes_goes_on(undisturbed, copy, tmp_path, monkeypatch):
  from dp_jax.training import run

  for name in ("write_parameters", "evaluate_state", "complete_release", "render_report"):
    original = getattr(run, name)

    def killed_after(*args, original=original, **kwargs):
      original(*args, **kwargs)
      raise Crash

    with monkeypatch.context() as patch:
      patch.setattr(run, name, killed_after)
      with pytest.raises(Crash):
        train(small_config(), copy, test_key_file=key_file(tmp_path), progress=False)
  train(small_config(), copy, progress=False)
  for name in ("params.safetensors", "privacy.json", "manifest.json"):
    assert (copy / "release" / name).read_bytes() == (undisturbed / "release" / name).read_bytes()
  assert sum(bool(entry.get("final")) for entry in lines(copy / "metrics.jsonl")) == 1


def test_a_second_pass_after_the_checkpoints_are_gone_is_refused(copy, tmp_path):
  shutil.rmtree(copy / "checkpoints")
  shutil.rmtree(copy / "private")
  with pytest.raises(ValueError, match="are gone, but the run has begun"):
    train(small_config(), copy, test_key_file=key_file(tmp_path), progress=False)


def test_a_process_killed_while_it_wrote_the_configuration_leaves_the_folder_usable(tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / ".config.json.1.tmp").write_text("{")
  assert train(small_config(train__steps=1), tmp_path / "run", progress=False).steps == 1


def test_two_processes_do_not_share_a_folder(copy):
  import fcntl

  with open(copy / ".lock", "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process"):
      train(small_config(), copy, progress=False)


def test_the_state_holds_no_key():
  """Keys are an item of their own in a checkpoint, so that deleting it deletes them all."""
  import optax

  from dp_jax.training.step import init_state

  state = init_state({"w": np.zeros(3, np.float32)}, optax.sgd(0.1))
  leaves = jax.tree.leaves(state)
  assert not any(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves)
