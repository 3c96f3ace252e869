"""The worked examples run, are short, and give what they say."""

import jax
import pytest
from support import ROOT

from dp_jax import cli
from dp_jax.statement.verify import verify_release
from experiments.examples import fit_on_arrays, linen_loop

FOLDER = ROOT / "experiments" / "examples"


@pytest.fixture(autouse=True)
def _as_a_user_has_it():
  with jax.numpy_dtype_promotion("standard"):
    yield


def test_a_model_and_a_task_by_config(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  config = f"--config={FOLDER / 'own_model_and_task.py'}"
  assert cli.main(["train", config, f"--workdir={tmp_path / 'run'}"]) == 0
  assert verify_release(tmp_path / "run" / "release").problems == []
  release = str(tmp_path / "run" / "release")
  capsys.readouterr()
  assert cli.main(["evaluate", release, config, "--trust_code"]) == 0
  (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("accuracy")]
  assert float(line.split()[1]) > 0.8


def test_a_linen_model_in_a_loop_of_ones_own():
  accuracy, epsilon = linen_loop.main()
  assert accuracy > 0.7 and 2.99 < epsilon <= 3.0


def test_fit_on_arrays(tmp_path):
  result = fit_on_arrays.main(str(tmp_path / "run"))
  assert result.metrics["test"]["accuracy"] > 0.9 and "each patient" in result.statement
  assert verify_release(tmp_path / "run" / "release").problems == []


def test_they_are_short():
  for file in FOLDER.glob("*.py"):
    code = [x for x in file.read_text().splitlines() if x.strip()]
    assert len(code) < 60, file.name
