"""What a checkpoint gives back is what was saved, or it is passed over; a full disk; the best."""

import json
import logging
import resource
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import STEPS, finish, flags_of, key_file, lines, small_config, start

import dp_jax
from dp_jax.cli import main
from dp_jax.evaluation.predictions import load_predictions
from dp_jax.statement.verify import verify_release
from dp_jax.training import loop
from dp_jax.training.checkpoints import checkpoint
from dp_jax.training.checkpoints.integrity import state_sums
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare

STATE = "release/params.safetensors"


class Crash(BaseException):
  """Stands for a process that ends at once."""


def _until(step, config, folder, **arguments):
  """Trains and ends before this step, unless the run is over sooner."""
  original = loop.Loop.step

  def crashing(self, state, index):
    if index == step:
      raise Crash
    return original(self, state, index)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.Loop, "step", crashing)
    with pytest.raises(Crash):
      train(config, folder, progress=False, **arguments)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed")
  train(small_config(), folder / "run", test_key_file=key_file(folder), progress=False)
  return folder / "run"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
  """Ended after 5 of 8 steps, with checkpoints of steps 2 and 4."""
  folder = tmp_path_factory.mktemp("crashed")
  _until(5, small_config(), folder / "run", test_key_file=key_file(folder))
  return folder / "run"


@pytest.fixture
def copy(crashed, tmp_path):
  return shutil.copytree(crashed, tmp_path / "run")


def _flip(path):
  """Changes one bit in the middle of a file."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(bytes(content))


def _largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# Arrays: a flipped bit reads back without an error from the library. Key: another one is as valid.
DAMAGE = {
  "a bit of the arrays": lambda step: _flip(_largest(step / "state")),
  "half of the arrays": lambda step: _cut(_largest(step / "state")),
  "no arrays": lambda step: shutil.rmtree(step / "state"),
  "a bit of the key": lambda step: _change(step / "keys" / "metadata", "secret"),
  "another test key": lambda step: _change(step / "about" / "metadata", "key_digest"),
  "half of the fingerprint": lambda step: _cut(step / "fingerprint" / "metadata"),
  "another fingerprint": lambda step: _change(step / "fingerprint" / "metadata", "data_digest"),
}


def _change(path, name):
  content = json.loads(path.read_text())
  content[name] = "0" * 63 + "1" if name == "secret" else "other"
  path.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
  undisturbed, copy, caplog, tmp_path, kind
):
  DAMAGE[kind](copy / "checkpoints" / "4")
  with caplog.at_level(logging.WARNING):
    train(small_config(), copy, test_key_file=key_file(tmp_path), progress=False)
  assert "warning: the checkpoint of step 4 cannot be read" in caplog.text
  assert (copy / STATE).read_bytes() == (undisturbed / STATE).read_bytes()
  for name in ("privacy.json",):
    assert (copy / "release" / name).read_text() == (undisturbed / "release" / name).read_text()
  assert [entry["step"] for entry in lines(copy / "private" / "training.jsonl")] == list(
    range(1, STEPS + 1)
  )


def test_what_is_not_checked_is_used_and_shows_in_the_result(undisturbed, copy, monkeypatch):
  """The broken variant: a checkpoint that is believed."""
  saved = json.loads((copy / "checkpoints" / "4" / "about" / "metadata").read_text())
  _flip(_largest(copy / "checkpoints" / "4" / "state"))
  monkeypatch.setattr(checkpoint, "state_sums", lambda state: saved["sums"])
  train(small_config(), copy, progress=False)
  assert (copy / STATE).read_bytes() != (undisturbed / STATE).read_bytes()


def _contents(folder):
  return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_where_none_can_be_read_nothing_is_touched(copy):
  for step in ("2", "4"):
    _flip(_largest(copy / "checkpoints" / step / "state"))
  before = _contents(copy)
  with pytest.raises(ValueError, match="none can be read"):
    train(small_config(), copy, progress=False)
  assert _contents(copy) == before


def test_steps_of_which_something_was_released_are_not_repeated(undisturbed, tmp_path):
  """The keys are gone then: with other noise, two releases would share their steps."""
  run = shutil.copytree(undisturbed, tmp_path / "run")
  (run / "private" / "result.json").unlink()
  _flip(_largest(run / "checkpoints" / str(STEPS) / "state"))
  before = _contents(run)
  with pytest.raises(ValueError, match="none can be read from which the run could go on"):
    train(small_config(), run, progress=False)
  assert _contents(run) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_any_changed_word_changes_the_sum(dtype):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.integers(-100, 100, (3, 4, 5)), dtype)
  (expected,) = state_sums([x])
  for _ in range(20):
    at = tuple(rng.integers(0, x.shape))
    assert state_sums([x.at[at].add(jnp.asarray(1, dtype))]) != [expected]
  swapped = x.at[0, 0, 0].set(x[0, 0, 1]).at[0, 0, 1].set(x[0, 0, 0])
  assert x[0, 0, 0] == x[0, 0, 1] or state_sums([swapped]) != [expected]
  assert state_sums({"a": jnp.zeros(()), "b": jnp.zeros((0, 3))}) == [0, 0]


def test_a_file_that_cannot_be_written_is_one_line_and_loses_nothing(
  undisturbed, tmp_path, monkeypatch, capfd
):
  """A limit on the size of files, set after step 3, stands for a full disk."""
  original = loop.Loop.step
  hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

  def step(self, state, index):
    if index == 3:
      while not (folder / "checkpoints" / "2").exists():  # it is written in the background
        time.sleep(0.01)
      resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    return original(self, state, index)

  folder = tmp_path / "run"
  flags = [*flags_of(small_config()), f"--workdir={folder}",
           f"--test_key_file={key_file(tmp_path)}"]  # fmt: skip
  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, "step", step)
    try:
      code = main(["train", *flags])
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  assert code == 2
  err = capfd.readouterr().err
  (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
  assert "cannot write a checkpoint" in line and "That of step 2 is intact" in line
  assert "Traceback" not in err
  code, _, err = finish(start("train", *flags))
  assert code == 0, err
  assert (folder / STATE).read_bytes() == (undisturbed / STATE).read_bytes()


BEST = {"eval": {"every": 2}, "checkpoint": {"every": 2, "best_metric": "accuracy"}}


@pytest.fixture(scope="module")
def best(tmp_path_factory):
  """A run that gets worse: its learning rate is far too large. Ended once on the way."""
  folder = tmp_path_factory.mktemp("best")
  config = small_config(**BEST, train__learning_rate=30.0, train__ema=0.0)
  _until(5, config, folder / "run", test_key_file=key_file(folder))
  result = train(config, folder / "run", progress=False)
  return config, folder / "run", result


def test_the_best_is_released_and_the_statement_is_of_all_planned_steps(best):
  config, folder, result = best
  entries = lines(folder / "metrics.jsonl")
  evaluated = {e["step"]: e["metrics"]["accuracy"] for e in entries if not e.get("final")}
  assert list(evaluated) == [2, 4, 6, 8]
  assert result.metrics["test"]["accuracy"] == max(evaluated.values()) > evaluated[8]
  record = json.loads((folder / "release" / "privacy.json").read_text())
  assert record["steps"] == STEPS
  assert record["epsilon"] == prepare(config).mechanism.epsilon(1e-3)
  assert "the one with the best accuracy" in record["statement"]
  (chosen,) = [e["step"] for e in entries if e.get("final")]
  assert evaluated[chosen] == max(evaluated.values())
  assert f"step {chosen}, is released" in record["statement"]
  assert load_predictions(folder / "predictions.npz").about["step"] == chosen
  assert not verify_release(folder / "release").problems
  assert (folder / "checkpoints" / "8").is_dir()  # the latest is kept beside the best
  for path in (folder / "checkpoints").rglob("*"):
    assert path.stat().st_mode & 0o077 == 0, path


def test_the_best_survives_a_restart_on_the_way(best, tmp_path):
  config, folder, _ = best
  train(config, tmp_path / "whole", test_key_file=key_file(tmp_path), progress=False)
  assert (tmp_path / "whole" / STATE).read_bytes() == (folder / STATE).read_bytes()
  arrays = dp_jax.load_release(folder).arrays
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays))


@pytest.mark.parametrize(("changes", "named"), [
  ({"data__declared": "private"}, "choosing a checkpoint by a private metric is a release"),
  ({"eval": {"every": 0}}, "needs eval.every"),
  ({"checkpoint": {"best_metric": "beauty"}}, "'beauty' is not one of accuracy"),
])  # fmt: skip
def test_a_choice_that_the_guarantee_does_not_cover_is_refused(changes, named):
  with pytest.raises(ValueError, match=named):
    prepare(small_config(**{**BEST, **changes}))


def test_a_checkpoint_that_takes_long_is_not_in_the_way(crashed):
  """Nothing half-written is left beside the complete ones, and no file is open to others."""
  names = sorted(p.name for p in (crashed / "checkpoints").iterdir())
  assert names == ["2", "4"]
  for path in [crashed / "checkpoints", *(crashed / "checkpoints").rglob("*")]:
    assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
