"""`compare` on work directories: where it writes, what it prints, what it refuses."""

import json

import numpy as np
import pytest
from made_up_work_directories import people_table, work_directory
from support import small_config, write_npz

from dp_jax import cli
from dp_jax.evaluation.predictions import load_predictions
from dp_jax.runs.compare import compare_runs
from dp_jax.training.run import train


def _pair(folder, declared="public", kept=()):
  first = work_directory(folder / "private_run", people_table(0.75), declared, epsilon=1.0)
  second = work_directory(folder / "plain_run", people_table(0.9), declared)
  for step, accuracy in kept:
    path = second / "private" / f"step_{step}_predictions.npz"
    path.write_bytes(people_table(accuracy, step=step).to_bytes())
  return first, second


def test_public_data_the_figures_are_printed_and_written(tmp_path, capsys):
  first, second = _pair(tmp_path)
  assert cli.main(["compare", str(first), str(second), "--groups=sex,age", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["written_to"] == str(first / "comparison.html")
  (comparison,) = found["comparisons"]
  assert comparison["labels"] == ["epsilon 1", "no privacy"] and found["units"] == 400
  assert comparison["overall_difference"][2] < 0
  assert found == {
    **json.loads((first / "comparison.json").read_text()), "written_to": found["written_to"]
  }  # fmt: skip
  assert cli.main(["compare", str(first), str(second), "--groups=sex"]) == 0
  out = capsys.readouterr().out
  assert "sex f: accuracy lies" in out and out.splitlines()[-1] == found["written_to"]
  html = (first / "comparison.html").read_text()
  assert "<script" not in html and "sex f" in html and "--config.eval.every=N" in html


def test_at_equal_accuracy_the_closest_step_is_taken(tmp_path):
  first, second = _pair(tmp_path, kept=[(5, 0.5), (10, 0.74), (15, 0.8)])
  outcome = compare_runs(first, second, ["sex"], resamples=100)
  (matched,) = outcome.content["matched"]["comparisons"]
  assert matched["labels"] == ["epsilon 1", "no privacy at step 10"]
  assert "at equal overall accuracy" in outcome.path.read_text()
  assert any(s.startswith("At equal accuracy: ") for s in outcome.sentences)


def test_private_data_only_the_path_is_printed(tmp_path, capsys):
  first, second = _pair(tmp_path, "private", kept=[(5, 0.5)])
  for flag in ([], ["--json"]):
    assert cli.main(["compare", str(first), str(second), "--groups=sex,age", *flag]) == 0
    out, err = capsys.readouterr()
    path = str(first / "private" / "comparison.html")
    assert (json.loads(out) if flag else out.strip()) == ({"written_to": path} if flag else path)
    assert err == ""
  assert sorted(p.name for p in first.iterdir()) == ["config.json", "private", "release"]
  for path in (first / "private").iterdir():
    assert path.stat().st_mode & 0o077 == 0, path
  assert "not covered by the guarantee" in (first / "private" / "comparison.html").read_text()


def test_one_private_run_makes_the_comparison_private(tmp_path):
  first = work_directory(tmp_path / "a", people_table(0.75), "public", epsilon=1.0)
  second = work_directory(tmp_path / "b", people_table(0.75), "private")
  outcome = compare_runs(first, second, ["sex"], resamples=50)
  assert outcome.private and outcome.path.parent == first / "private"


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["private_run"], "give RUN_PRIVATE and RUN_PLAIN, got 1"),
    (["private_run", "plain_run"], "give --groups"),
    (["private_run", "plain_run", "--groups=colour"], "the predictions have age, class, sex"),
    (["private_run", "plain_run", "--groups=sex", "--metrics=auroc"], "auroc needs two classes"),
    (["plain_run", "private_run", "--groups=sex"], "is no run with privacy"),
    (["private_run", "nowhere", "--groups=sex"], "is not the work directory of a run"),
  ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, said):
  _pair(tmp_path)
  paths = [a if a.startswith("--") else str(tmp_path / a) for a in arguments]
  assert cli.main(["compare", *paths]) == 2
  out, err = capsys.readouterr()
  assert out == "" and said in err and len(err.splitlines()) == 1
  assert not (tmp_path / "private_run" / "comparison.html").exists()


def test_a_run_that_is_not_complete_or_of_other_records_is_refused(tmp_path):
  first, second = _pair(tmp_path)
  (second / "predictions.npz").write_bytes(people_table(0.9, data_digest="other").to_bytes())
  with pytest.raises(ValueError, match="their data differ"):
    compare_runs(first, second, ["sex"])
  (second / "predictions.npz").unlink()
  with pytest.raises(ValueError, match="the run is not complete"):
    compare_runs(first, second, ["sex"])


def test_two_private_runs_are_compared_too(tmp_path):
  first = work_directory(tmp_path / "a", people_table(0.75), "public", epsilon=1.0)
  second = work_directory(tmp_path / "b", people_table(0.75), "public", epsilon=1.0)
  outcome = compare_runs(first, second, ["sex"], resamples=50)
  assert outcome.content["comparisons"][0]["labels"] == ["epsilon 1 (first)", "epsilon 1 (second)"]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
  """A plain run on 60 people with two records each, evaluated after every second step."""
  folder = tmp_path_factory.mktemp("plain")
  rng = np.random.default_rng(0)
  data = write_npz(
    folder / "data", rng.integers(0, 255, (120, 4, 4, 1), np.uint8), rng.integers(0, 2, 120),
    person=np.arange(120) % 60, sex=np.array(["f", "m"])[np.arange(120) % 2], age=np.arange(120),
  )  # fmt: skip
  config = small_config(
    data={
      "source": "npz", "path": str(data), "declared": "public", "num_classes": 2,
      "groups": ["sex", "age"], "group_bins": [[], [40.0]],
    },
    model={"name": "linear"}, privacy={"enabled": False, "unit": "person", "sampling_rate": 0.5},
    train__steps=4, eval={"every": 2},
  )  # fmt: skip
  result = train(config, folder / "run", progress=False)
  return folder / "run", result


def test_a_run_keeps_what_it_predicted_for_whom(plain_run):
  folder, result = plain_run
  table = load_predictions(folder / "predictions.npz")
  assert table.unit.tolist() == (np.arange(120) % 60).tolist() and table.num_units == 60
  assert set(table.groups["age"]) == {"below 40", "40 and above"}
  assert table.groups["sex"].tolist() == ["f", "m"] * 60
  assert table.about["unit"] == "person" and table.about["step"] == 4
  found = result.metrics["test"]
  assert found["accuracy"] == np.mean(table.predicted == table.label)
  assert 0 <= found["auroc"] <= 1 and 0 <= found["average_precision"] <= 1


def test_a_plain_run_keeps_its_steps(plain_run):
  folder, _ = plain_run
  kept = load_predictions(folder / "private" / "step_2_predictions.npz")
  assert kept.about["step"] == 2 and len(kept.label) == 120
  assert (folder / "unprotected" / "step_2.safetensors").stat().st_mode & 0o077 == 0
  assert not (folder / "unprotected" / "step_4.safetensors").exists()
