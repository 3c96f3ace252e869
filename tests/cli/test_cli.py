"""The command line: JSON for scripts, one clear line and exit code 2 for bad input."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from support import ROOT, flags_of, small_config, write_npz

import dp_jax
from dp_jax.cli import COMMANDS, main
from dp_jax.data.sources.opening import open_source
from dp_jax.training.run import train


def run(capsys, *arguments):
  """Exit code, standard output and standard error of one command."""
  code = main(list(map(str, arguments)))
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def refused(capsys, *arguments):
  """The one line that bad input gives."""
  code, _, err = run(capsys, *arguments)
  assert code == 2
  (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
  assert "Traceback" not in err
  return line


MECHANISM = {
  "--sampling": "poisson",
  "--sampling_rate": "0.01",
  "--steps": "1000",
  "--delta": "1e-5",
}


def flags(**changes):
  merged = {**MECHANISM, **{f"--{name}": value for name, value in changes.items()}}
  return [f"{name}={value}" for name, value in merged.items() if value is not None]


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
  """A completed small run on public data."""
  folder = tmp_path_factory.mktemp("cli") / "run"
  train(small_config(), folder, progress=False)
  return folder


def test_calibrate_then_epsilon(capsys):
  code, out, _ = run(capsys, "calibrate", "--epsilon=2", *flags(), "--json")
  calibrated = json.loads(out)
  assert code == 0
  assert set(calibrated) == {
    "noise_multiplier", "epsilon", "delta", "sampling", "sampling_rate", "steps", "accountant",
    "adjacency",
  }  # fmt: skip
  assert 2 * (1 - 1e-3) <= calibrated["epsilon"] <= 2
  noise = calibrated["noise_multiplier"]
  code, out, _ = run(capsys, "epsilon", f"--noise_multiplier={noise!r}", *flags(), "--json")
  assert code == 0 and json.loads(out) == calibrated


def test_every_scheme_has_its_flags(capsys):
  for changes in [
    {"sampling": "full_batch", "sampling_rate": None, "steps": 1},
    {"sampling": "truncated_poisson", "cap": 1000, "num_units": 60000},
    {
      "sampling": "fixed_size", "sampling_rate": None, "expected_batch_size": 600,
      "num_units": 60000, "adjacency": "replace_one",
    },
    {
      "sampling": "stream", "sampling_rate": None, "expected_batch_size": 600,
      "num_units": 60000,
    },
  ]:  # fmt: skip
    code, out, err = run(capsys, "epsilon", "--noise_multiplier=4", *flags(**changes), "--json")
    assert code == 0, err
    assert json.loads(out)["sampling"] == changes["sampling"]
    if changes["sampling"] == "full_batch":
      assert json.loads(out)["sampling_rate"] == 1.0
  assert "needs --cap" in refused(
    capsys, "epsilon", "--noise_multiplier=4",
    *flags(sampling="truncated_poisson", num_units=60000),
  )  # fmt: skip
  assert "does not use --sampling_rate" in refused(
    capsys, "epsilon", "--noise_multiplier=4", *flags(sampling="full_batch")
  )


@pytest.mark.parametrize(("changes", "named"), [
  ({"epsilon": "0"}, "epsilon"),
  ({"epsilon": "-1"}, "epsilon"),
  ({"epsilon": "nan"}, "epsilon"),
  ({"epsilon": "x"}, "epsilon"),
  ({"epsilon": None}, "--epsilon"),
  ({"delta": "0"}, "delta"),
  ({"delta": "1"}, "delta"),
  ({"sampling_rate": "0"}, "rate"),
  ({"sampling_rate": "1.5"}, "rate"),
  ({"steps": "0"}, "steps"),
  ({"steps": None}, "--steps"),
  ({"sampling": "shuffled"}, "sampling"),
  ({"adjacency": "swap"}, "adjacency"),
  ({"unknown": "1"}, "unknown"),
])  # fmt: skip
def test_calibrate_refuses_bad_input(capsys, changes, named):
  assert named in refused(capsys, "calibrate", *flags(**{"epsilon": "2", **changes}))


@pytest.mark.parametrize(("override", "named"), [
  ("--config.privacy.epsilon=0", "epsilon"),
  ("--config.privacy.delta=2", "delta"),
  ("--config.privacy.sampling_rate=1.5", "rate"),
  ("--config.train.steps=0", "train.steps"),
  ("--config.privacy.nonsense=1", "nonsense"),
  ("--config.train.steps=many", "steps"),
  ("--config.train.optimizer=magic", "train.optimizer"),
  ("--config.data.source=nowhere", "nowhere"),
  ("--config.model.weights=/no/such.safetensors", "/no/such.safetensors"),
  ("--config.model.trainable=^nothing$", "model.trainable"),
  ("--config.model.name=magic", "model.name"),
  ("--config.model.kwargs.groups=5", "groups"),
  ("--config.model.kwargs.depth=3", "depth"),
  ("--config.model.name=linear", "has no widths, strides, groups; it takes use_bias"),
  ("--config.train.compute_dtype=float16", "train.compute_dtype"),
  ("--config.train.memory_budget=-1", "train.memory_budget"),
  ("--config.privacy.unit=patient_id", "grouped by 'patient_id'"),
  ("--config.privacy.cap=5", "privacy.cap"),
  ("--config.train.warmup_steps=100", "warmup_steps"),
  ("--test_key_file=/no/such/key", "/no/such/key"),
])  # fmt: skip
def test_train_refuses_bad_input_and_touches_no_folder(capsys, tmp_path, override, named):
  workdir = tmp_path / "run"
  line = refused(capsys, "train", *flags_of(small_config()), f"--workdir={workdir}", override)
  assert named in line
  assert not workdir.exists()


def test_train_refuses_records_that_do_not_fit(capsys, tmp_path):
  images, labels = np.zeros((20, 4, 4, 1), np.uint8), np.arange(20) % 3
  labels[7] = 9
  data = {"source": "npz", "declared": "public", "num_classes": 3}
  for path, named in [
    (write_npz(tmp_path / "labels", images, labels), "record 7"),
    (tmp_path / "missing", "missing"),
  ]:
    config = small_config(data={**data, "path": str(path)})
    line = refused(capsys, "train", *flags_of(config), f"--workdir={tmp_path / 'run'}")
    assert named in line and not (tmp_path / "run").exists()
  private = small_config(
    data={**data, "path": str(tmp_path / "labels"), "declared": "private", "strict": True}
  )
  assert "record 7" in refused(capsys, "train", *flags_of(private), f"--workdir={tmp_path / 'run'}")


def test_train_refuses_a_folder(capsys, tmp_path, completed):
  config = flags_of(small_config())
  (tmp_path / "file").write_text("")
  assert "cannot write" in refused(capsys, "train", *config, f"--workdir={tmp_path}/file/run")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "thesis.tex").write_text("")
  assert "not empty" in refused(capsys, "train", *config, f"--workdir={tmp_path / 'full'}")
  assert "--workdir" in refused(capsys, "train", *config)
  other = flags_of(small_config(train__learning_rate=0.3))
  assert "learning_rate" in refused(capsys, "train", *other, f"--workdir={completed}")
  assert "--config" in refused(capsys, "train", f"--workdir={tmp_path / 'run'}")
  missing = refused(capsys, "train", "--config=nowhere.py", f"--workdir={tmp_path / 'run'}")
  assert "nowhere.py" in missing


def test_a_large_delta_is_a_warning_everywhere(capsys, caplog, tmp_path):
  config = small_config(privacy__delta=0.01, train__steps=2)
  code, out, _ = run(capsys, "train", *flags_of(config), f"--workdir={tmp_path / 'run'}")
  assert code == 0
  assert "delta 0.01" in caplog.text and "Warning: delta 0.01" in out
  assert "delta 0.01 is not below" in (tmp_path / "run" / "report.html").read_text()


def test_train_prints_one_json_object_last(completed):
  process = subprocess.run(
    [sys.executable, "-m", "dp_jax", "train", *flags_of(small_config()), "--json",
     f"--workdir={completed}"],
    cwd=ROOT, capture_output=True, text=True, check=True,
  )  # fmt: skip
  result = json.loads(process.stdout.splitlines()[-1])
  assert set(result) == {"epsilon", "delta", "metrics", "steps", "wall_seconds", "workdir"}
  assert 0 <= result["metrics"]["test"]["accuracy"] <= 1
  assert 4 * (1 - 1e-3) <= result["epsilon"] <= 4


def test_without_privacy_there_is_no_epsilon_and_no_release(capsys, tmp_path):
  config = small_config(privacy__enabled=False, train__steps=2)
  code, out, _ = run(capsys, "train", *flags_of(config), f"--workdir={tmp_path / 'run'}", "--json")
  assert code == 0
  assert json.loads(out.splitlines()[-1])["epsilon"] is None
  assert "without differential privacy" in out
  assert not (tmp_path / "run" / "release").exists()
  assert (tmp_path / "run" / "unprotected").stat().st_mode & 0o777 == 0o700
  assert dp_jax.load_release(tmp_path / "run").privacy is None


def test_evaluate_and_predict_agree_with_training(capsys, tmp_path, completed):
  config = flags_of(small_config())
  code, out, _ = run(capsys, "evaluate", completed / "release", *config, "--json")
  trained = json.loads((completed / "private" / "result.json").read_text())["metrics"]["test"]
  assert code == 0
  evaluated = json.loads(out)
  assert evaluated["accuracy"] == trained["accuracy"]
  np.testing.assert_allclose(evaluated["loss"], trained["loss"], rtol=1e-5)
  table = tmp_path / "predictions.csv"
  assert run(capsys, "predict", completed / "release", *config, f"--out={table}")[0] == 0
  rows = [row.split(",") for row in table.read_text().splitlines()]
  release = dp_jax.load_release(completed / "release")
  digits = open_source("digits", "test", num_records=200)
  gathered = digits.gather(np.arange(len(digits)))
  expected = release.predict(gathered["inputs"])
  assert len(rows) == 1 + len(digits)
  assert [row[1] for row in rows[1:]] == [str(i) for i in expected.argmax(axis=1)]
  np.testing.assert_allclose(
    np.array([row[2:] for row in rows[1:]], float), expected, rtol=1e-4, atol=1e-6
  )
  accuracy = np.mean(expected.argmax(axis=1) == gathered["label"])
  assert accuracy == trained["accuracy"]
  with pytest.raises(ValueError, match=r"\(8, 8, 1\)"):
    release.predict(np.zeros((2, 9, 9, 1)))
  assert "no weights file" in refused(capsys, "evaluate", tmp_path / "nowhere", *config)


def test_evaluation_of_private_data_is_written_not_shown(capsys, completed):
  config = flags_of(small_config(data__declared="private"))
  code, out, _ = run(capsys, "evaluate", completed / "release", *config, "--json")
  assert code == 0 and set(json.loads(out)) == {"split", "written_to"}
  assert "accuracy" in (completed / "private" / "evaluation.json").read_text()


def test_verify_and_report(capsys, tmp_path, completed):
  code, out, _ = run(capsys, "verify", completed / "release")
  assert code == 0, out
  text = (completed / "report.html").read_text()
  (completed / "report.html").unlink()
  assert run(capsys, "report", completed)[0] == 0
  assert (completed / "report.html").read_text() == text
  assert run(capsys, "report", completed, f"--compare=again={completed}")[0] == 0
  assert "again" in (completed / "report.html").read_text()
  assert "LABEL=DIR" in refused(capsys, "report", completed, "--compare=x")
  assert refused(capsys, "report", tmp_path / "nowhere")
  assert refused(capsys, "verify")


def test_help_of_every_command(capsys):
  code, out, _ = run(capsys, "--help")
  assert code == 0
  for name in COMMANDS:
    assert re.search(rf"^  {name} ", out, re.M)
    code, text, _ = run(capsys, name, "--help")
    assert code == 0 and f"dp-jax {name}" in text
  assert run(capsys)[0] == 2
  assert "unknown command 'fly'" in refused(capsys, "fly")


def test_plan_prints_a_table_and_writes_a_plot(capsys, tmp_path):
  arguments = ["--num_units=10000", "--epsilon=2", "--delta=1e-5", "--batches=100,1000"]
  plot = tmp_path / "plan.png"
  code, out, _ = run(capsys, "plan", *arguments, "--epochs=5", f"--plot={plot}")
  assert code == 0 and len(out.splitlines()) == 3
  assert plot.read_bytes().startswith(b"\x89PNG")
  code, out, _ = run(capsys, "plan", *arguments, "--steps=50", "--batch=1000", "--json")
  assert code == 0
  assert [row["steps"] for row in json.loads(out)["rows"]] == [500, 50]
  for extra, named in [
    ([], "--epochs"),
    (["--epochs=5", "--steps=3"], "--epochs"),
    (["--steps=3"], "--batch"),
    (["--epochs=5", "--plot=plan.doc"], "must end in"),
    (["--epochs=5", "--plot=/no/such/plan.png"], "no folder"),
    (["--epochs=5", "--batches=many"], "whole numbers"),
    (["--epochs=5", "--batches=20000"], "20000"),
  ]:
    assert named in refused(capsys, "plan", *arguments, *extra)


def test_settings_that_a_solver_ignores_are_refused(capsys, tmp_path):
  """A config file that sets them for one method, and a flag that takes another."""
  command = ["train", f"--config={ROOT / 'configs' / 'cifar10_features.py'}",
             f"--workdir={tmp_path / 'run'}", "--config.data.path=nowhere.npz",
             "--config.data.declared=public",
             "--config.solver.method=newton", "--config.solver.centre_share=0"]  # fmt: skip
  line = refused(capsys, *command)
  assert "solver.whiten=0.2 is not used by solver.method=newton" in line
  assert "feature_covariance alone" in line
  assert not (tmp_path / "run").exists()
