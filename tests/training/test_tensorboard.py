"""TensorBoard opens a run: what was trained, under private/ unless the data is public."""

import builtins

import pytest
from support import STEPS, key_file, lines, small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dp_jax.training import loop
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare


def _opened(folder):
  events = EventAccumulator(str(folder))
  events.Reload()
  return {
    tag: [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["scalars"]
  }


def test_a_resumed_run_reads_back_as_one(tmp_path):
  """Ended after step 5, it goes on from the checkpoint of step 4."""
  config = small_config(train__tensorboard=True, eval={"every": 2})
  original = loop.Loop.step

  def step(self, state, index):
    if index == 5:
      raise KeyboardInterrupt
    return original(self, state, index)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.Loop, "step", step)
    with pytest.raises(KeyboardInterrupt):
      train(config, tmp_path / "run", test_key_file=key_file(tmp_path), progress=False)
  train(config, tmp_path / "run", test_key_file=key_file(tmp_path), progress=False)
  scalars = _opened(tmp_path / "run" / "tensorboard")
  logged = lines(tmp_path / "run" / "private" / "training.jsonl")
  assert [step for step, _ in scalars["train/loss"]] == list(range(1, STEPS + 1))
  for (_, value), entry in zip(scalars["train/loss"], logged, strict=True):
    assert value == pytest.approx(entry["loss"])
  assert scalars["run/epsilon"][-1][0] == STEPS and 0 < scalars["run/epsilon"][-1][1] <= 4.0
  assert [step for step, _ in scalars["eval/accuracy"]] == [2, 4, 6]
  assert all(value > 0 for _, value in scalars["run/units_per_second"])


def test_on_private_data_events_are_private(tmp_path):
  config = small_config(data__declared="private", train__tensorboard=True, train__steps=2)
  train(config, tmp_path / "run", progress=False)
  assert "train/loss" in _opened(tmp_path / "run" / "private" / "tensorboard")
  outside = [p for p in (tmp_path / "run").rglob("*tfevents*") if "private" not in p.parts]
  assert outside == []
  for path in (tmp_path / "run" / "private").rglob("*"):
    assert path.stat().st_mode & 0o077 == 0, path


def test_it_may_be_switched_on_later(tmp_path):
  config = small_config(train__steps=2)
  assert prepare(config).fingerprint() != prepare(small_config(train__steps=3)).fingerprint()
  train(config, tmp_path / "run", progress=False)
  plotted = small_config(train__steps=2, train__tensorboard=True)
  assert train(plotted, tmp_path / "run", progress=False).steps == 2


def test_where_the_package_is_missing_the_run_is_refused_before_it_starts(monkeypatch):
  original = builtins.__import__

  def without(name, *args, **kwargs):
    if name.startswith("tensorboard"):
      raise ImportError(name)
    return original(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", without)
  with pytest.raises(ValueError, match=r"pip install 'dp_jax\[tensorboard\]'"):
    prepare(small_config(train__tensorboard=True))
