"""What follows the release cannot stop it."""

import errno
import json

import numpy as np
import pytest
from support import flags_of, small_config, write_npz

from dp_jax.cli import main
from dp_jax.parallel.stopping import Stopped
from dp_jax.statement.verify import verify_release
from dp_jax.training import evaluating
from dp_jax.training import run as run_module
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.completing import release_stands
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  rng = np.random.default_rng(0)
  return write_npz(
    tmp_path_factory.mktemp("data"), rng.random((40, 4), np.float32), np.arange(40) % 3,
    person=np.array([f"p{i % 10}" for i in range(40)]),
  )  # fmt: skip


def _config(data, declared="private", **changes):
  values = {"source": "npz", "path": str(data), "declared": declared, "num_classes": 3}
  return small_config(
    data={**values, **changes.pop("data", {})}, model={"name": "linear"}, train__steps=2, **changes
  )


def _fails(*_, **__):
  raise RuntimeError("record of person17")


def _interrupted(*_):
  raise KeyboardInterrupt


def test_an_evaluation_that_fails_leaves_the_whole_release(data, tmp_path, monkeypatch, capsys):
  config, folder = _config(data), tmp_path / "run"
  command = ["train", *flags_of(config), f"--workdir={folder}"]
  for name in ("evaluate_state", "write_predictions", "render_report"):
    with monkeypatch.context() as patch:
      patch.setattr(run_module, name, _fails)
      assert main(command) == 2
    told = capsys.readouterr().err
    assert "release' is complete, but what follows it" in told and "RuntimeError, see" in told
    assert "person17" not in told and "Traceback" not in told
    assert not verify_release(folder / "release").problems
    paid = (folder / "ledger.jsonl").read_bytes()
    monkeypatch.setattr(run_module, "run_steps", _fails)  # nothing is trained again
  assert "person17" in (folder / "private" / "evaluation_error.txt").read_text()
  shown = [p for p in folder.rglob("*") if p.is_file() and p.parent.name != "private"]
  assert not [p for p in shown if b"person17" in p.read_bytes()]
  with monkeypatch.context() as patch:  # which is no failure
    patch.setattr(run_module, "evaluate_state", _interrupted)
    with pytest.raises(KeyboardInterrupt):
      train(config, folder, progress=False)
  assert train(config, folder, progress=False).steps == 2
  assert (folder / "ledger.jsonl").read_bytes() == paid


def test_of_public_data_the_failure_is_quoted(data, tmp_path):
  run, folder = prepare(_config(data, "public")), WorkDir(tmp_path)
  named = r"failed \(RuntimeError: record of person17\)"
  with pytest.raises(ValueError, match=named) as raised, release_stands(run, folder):
    _fails()
  assert isinstance(raised.value.__cause__, RuntimeError) and not list(tmp_path.iterdir())
  full = OSError(errno.ENOSPC, "No space left on device")
  for error in (Stopped(), full):  # both are told as anywhere else
    with pytest.raises(type(error)) as same, release_stands(run, folder):
      raise error
    assert same.value is error


def test_an_evaluation_that_fails_during_training_does_not_stop_it(
  data, tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(evaluating, "evaluate_state", _fails)
  config = _config(data, eval={"every": 1})
  assert train(config, tmp_path / "run", progress=False).steps == 2
  assert "no evaluation after step 1 (RuntimeError)" in caplog.text
  assert "person17" not in caplog.text


def _held_out(data, folder, **columns):
  """The same training split, with other held-out columns."""
  write_npz(folder, *(np.load(data / "train.npz")[k] for k in ("image", "label")),
            splits=("test",), **columns)  # fmt: skip
  (folder / "train.npz").write_bytes((data / "train.npz").read_bytes())
  return folder


@pytest.mark.parametrize("declared", ["private", "public"])
def test_held_out_ids_that_are_all_missing_are_refused_before_anything_is_spent(
  data, tmp_path, declared
):
  other = _held_out(data, tmp_path / "data", person=np.array([""] * 40))
  config = _config(other, declared, privacy__unit="person")
  with pytest.raises(ValueError, match=r"column 'person' of data.eval_split='test' does not say"):
    train(config, tmp_path / "run", progress=False)
  assert not (tmp_path / "run").exists()
  prepare(_config(_held_out(data, tmp_path / "no"), declared, privacy__unit="person"))


def test_bad_records_of_an_earlier_process_stay_on_the_list(data, tmp_path, monkeypatch):
  labels = np.arange(40) % 3
  labels[5] = 9
  other = write_npz(tmp_path / "data", np.load(data / "train.npz")["image"], labels)
  config, folder = (
    _config(other, privacy__sampling_rate=None, privacy__sampling="full_batch"),
    tmp_path,
  )
  with monkeypatch.context() as patch:
    patch.setattr(run_module, "evaluate_state", _fails)
    with pytest.raises(ValueError, match="is complete"):
      train(config, folder / "run", progress=False)
  train(config, folder / "run", progress=False)
  notes = json.loads((folder / "run" / "private" / "bad_records.json").read_text())
  assert [*notes["train"]] == [*notes["eval"]] == ["5"]
