"""A ledger that runs share: what is left of a budget, and what is refused."""

import json
import shutil

import pytest
from support import small_config

from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.statement.verify import verify_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare

BUDGET = PrivacySpec(6.0, 1e-3)


def _train(folder, epsilon, **ledger):
  return train(
    small_config(privacy__epsilon=epsilon, train__steps=2), folder, progress=False, **ledger
  )


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  """Two runs of epsilon 3 and 2 in one ledger with a budget of 6."""
  folder = tmp_path_factory.mktemp("shared")
  ledger = folder / "ledger.jsonl"
  _train(folder / "first", 3.0, ledger_file=ledger, ledger_budget=BUDGET)
  _train(folder / "second", 2.0, ledger_file=ledger)
  return folder, ledger


def test_the_second_release_states_both(shared):
  folder, ledger = shared
  record = json.loads((folder / "second" / "release" / "privacy.json").read_text())
  assert record["epsilon"] <= 2.0
  assert record["ledger"]["releases"] == 2
  assert record["ledger"]["epsilon"] == Ledger(ledger).epsilon(1e-3)
  assert 3.0 < record["ledger"]["epsilon"] < 5.0
  assert "With all 2 releases" in record["statement"]
  assert not verify_release(folder / "second" / "release").problems


def test_a_run_that_would_overdraw_is_refused_before_it_trains(shared, tmp_path):
  _, ledger = shared
  before = ledger.read_text()
  with pytest.raises(ValueError, match="over the ledger's budget of 6"):
    _train(tmp_path / "third", 6.0, ledger_file=ledger)
  assert ledger.read_text() == before
  assert not list((tmp_path / "third" / "checkpoints").iterdir())


def test_going_on_pays_once_and_needs_the_same_ledger(shared, tmp_path, monkeypatch):
  from dp_jax.training import loop

  ledger = tmp_path / "ledger.jsonl"

  def crash(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, "step", crash)
    with pytest.raises(KeyboardInterrupt):
      _train(tmp_path / "run", 3.0, ledger_file=ledger)
  with pytest.raises(ValueError, match="give the same --ledger"):
    _train(tmp_path / "run", 3.0)
  _train(tmp_path / "run", 3.0, ledger_file=ledger)
  assert len(Ledger(ledger).releases) == 1


def test_a_second_pass_with_another_key_is_not_free(tmp_path, monkeypatch):
  """The checkpoints, and the key with them, are gone while the shared ledger holds the run."""
  from dp_jax.training import loop

  ledger, workdir = tmp_path / "ledger.jsonl", tmp_path / "run"

  def crash(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, "step", crash)
    with pytest.raises(KeyboardInterrupt):
      _train(workdir, 3.0, ledger_file=ledger)
  shutil.rmtree(workdir / "checkpoints")
  with pytest.raises(ValueError, match="with a key that is gone"):
    _train(workdir, 3.0, ledger_file=ledger)
  assert Ledger(ledger).count == 1
  assert not (workdir / "release").exists()


def test_a_run_that_was_refused_may_start_with_a_larger_budget(tmp_path):
  small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
  for file, epsilon in ((small, 1.0), (large, 6.0)):
    Ledger(file, PrivacySpec(epsilon, 1e-3)).reserve(
      prepare(small_config(privacy__epsilon=0.5, train__steps=2)).mechanism,
      "training",
      unit="record",
    )
  with pytest.raises(ValueError, match="over the ledger's budget"):
    _train(tmp_path / "run", 3.0, ledger_file=small)
  shutil.copy(large, small)
  _train(tmp_path / "run", 3.0, ledger_file=small)
  assert len(Ledger(small).releases) == 2


def test_a_budget_needs_a_ledger(tmp_path):
  with pytest.raises(ValueError, match="--ledger=FILE"):
    _train(tmp_path / "run", 3.0, ledger_budget=BUDGET)


@pytest.fixture(name="stopped")
def _stopped(tmp_path, monkeypatch):
  """The folder of a run that has reserved in a shared ledger and was killed in its first step."""
  from dp_jax.training import loop

  def crash(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, "step", crash)
    with pytest.raises(KeyboardInterrupt):
      _train(tmp_path / "run", 3.0, ledger_file=tmp_path / "ledger.jsonl")
  return tmp_path / "run", tmp_path / "ledger.jsonl"


def test_of_two_copies_of_a_folder_one_is_released(stopped, monkeypatch):
  """They have one key and one reservation, but each would be a release."""
  folder, ledger = stopped
  copies = [folder.parent / name for name in ("begun", "after")]
  shutil.copytree(folder, copies[0])
  _train(folder, 3.0, ledger_file=ledger)
  with pytest.raises(ValueError, match="another copy of this run has been finished"):
    _train(copies[0], 3.0, ledger_file=ledger)
  # One that was under way when the first came in is refused where it would release.
  shutil.copytree(copies[0], copies[1])
  with monkeypatch.context() as patch:
    patch.setattr(Ledger, "check_unfinished", lambda *_: None)
    patch.setattr("dp_jax.training.run._complete", lambda *_: pytest.fail("released"))
    with pytest.raises(ValueError, match="another copy of this run has been finished"):
      _train(copies[1], 3.0, ledger_file=ledger)
  assert not any((copy / "release").exists() for copy in copies)
  assert len(Ledger(ledger).releases) == 1
  # A folder that is complete says again what it has.
  assert _train(folder, 3.0, ledger_file=ledger).workdir == str(folder)


def test_folder_and_ledger_may_be_moved(stopped, tmp_path):
  folder, ledger = stopped
  shutil.move(folder, tmp_path / "moved")
  with pytest.raises(ValueError, match="give the same"):
    _train(tmp_path / "moved", 3.0, ledger_file=tmp_path / "empty.jsonl")
  shutil.move(ledger, tmp_path / "elsewhere.jsonl")
  with pytest.raises(ValueError, match="wherever that file is now"):
    _train(tmp_path / "moved", 3.0, ledger_file=tmp_path / "empty.jsonl")
  done = _train(tmp_path / "moved", 3.0, ledger_file=tmp_path / "elsewhere.jsonl")
  assert len(Ledger(tmp_path / "elsewhere.jsonl").releases) == 1
  shutil.move(tmp_path / "moved", tmp_path / "again")
  again = _train(tmp_path / "again", 3.0, ledger_file=tmp_path / "elsewhere.jsonl")
  assert again.workdir == str(tmp_path / "again") != done.workdir
  assert f"report: {tmp_path / 'again'}" in again.summary()


def test_a_run_that_was_refused_may_start_with_another_ledger(tmp_path):
  """The folder does not claim to have reserved."""
  small = tmp_path / "small.jsonl"
  Ledger(small, PrivacySpec(1.0, 1e-3)).reserve(
    prepare(small_config(privacy__epsilon=0.5, train__steps=2)).mechanism, "training", unit="record"
  )
  with pytest.raises(ValueError, match="over the ledger's budget"):
    _train(tmp_path / "run", 3.0, ledger_file=small)
  assert not (tmp_path / "run" / "private" / "ledger_identity.json").exists()
  _train(tmp_path / "run", 3.0, ledger_file=tmp_path / "large.jsonl")
  assert len(Ledger(tmp_path / "large.jsonl").releases) == 1


def test_people_and_records_have_no_common_budget(shared, tmp_path):
  _, ledger = shared
  with pytest.raises(ValueError, match="for each 'record', and this one would be for each 'pat"):
    Ledger(ledger).reserve(
      prepare(small_config(privacy__epsilon=0.5, train__steps=2)).mechanism, "training",
      unit="patient_id",
    )  # fmt: skip


def test_a_ledger_that_cannot_be_written_does_not_bind_the_folder(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    _train(tmp_path / "run", 3.0, ledger_file=tmp_path / "file" / "ledger.jsonl")
  assert not (tmp_path / "run" / "private" / "ledger_identity.json").exists()
  _train(tmp_path / "run", 3.0, ledger_file=tmp_path / "good.jsonl")
  assert len(Ledger(tmp_path / "good.jsonl").releases) == 1


def test_an_entry_that_may_be_on_the_disk_binds_the_folder(tmp_path, monkeypatch):
  append = Ledger._append

  def fail(self, content, file):
    append(self, content, file)
    raise OSError("the disk")

  with monkeypatch.context() as patch:
    patch.setattr(Ledger, "_append", fail)
    with pytest.raises(OSError, match="the disk"):
      _train(tmp_path / "run", 3.0, ledger_file=tmp_path / "ledger.jsonl")
  with pytest.raises(ValueError, match="give the same --ledger"):
    _train(tmp_path / "run", 3.0, ledger_file=tmp_path / "other.jsonl")
