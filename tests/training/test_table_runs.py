"""Runs on tables: from a configuration to predictions, with people as units."""

import csv
import dataclasses
import json
import re

import numpy as np
import pytest
from support import finish, flags_of, lines, small_config, start

from dp_jax.runs.using import evaluate_release, predict_release
from dp_jax.statement.verify import verify_release
from dp_jax.training import loop
from dp_jax.training.release import load_release
from dp_jax.training.run import train
from dp_jax.training.setup.open_data import read_groups
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.setup.target import make_spec


def write(file, seed=0, people=120, malformed=0):
  """Three rows a person; older people are ill."""
  rng = np.random.default_rng(seed)
  rows = [["person", "age", "bp", "ill", "sex"]]
  for i in range(3 * people):
    age = rng.integers(20, 90)
    rows.append([f"p{i % people}", age, rng.integers(60, 140), int(age > 55), "fm"[i % 2]])
  for row in rows[1 : 1 + malformed]:
    row[2] = "high"
  file.write_text("\n".join(",".join(map(str, row)) for row in rows))
  return file


def config_of(file, **changes):
  data = {
    "source": "csv", "path": str(file), "declared": "public", "features": ["age", "bp"],
    "feature_ranges": [[20.0, 90.0], [60.0, 140.0]], "label_columns": ["ill"],
    "class_names": ["0", "1"], "eval_fraction": 0.3, "max_records_per_unit": 2,
    "groups": ["sex", "age"], "group_bins": [[], [55.0]],
  }  # fmt: skip
  for name in [name for name in changes if name.startswith("data__")]:
    data[name.removeprefix("data__")] = changes.pop(name)
  values = {
    "model": {"name": "linear"}, "train__learning_rate": 1.0, "train__steps": 20,
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch", "unit": "person"},
  }  # fmt: skip
  return small_config(data=data, **{**values, **changes})


def test_a_run_and_its_release(tmp_path):
  config = config_of(write(tmp_path / "table.csv"))
  result = train(config, tmp_path / "run", progress=False)
  accuracy = result.metrics["test"]["accuracy"]
  assert accuracy > 0.9
  assert "for each person" in result.statement
  assert not verify_release(tmp_path / "run" / "release").problems
  record = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
  public = record["treated_as_public"]
  assert public["features"] == ["age", "bp"] and public["feature_ranges"][0] == [20.0, 90.0]
  assert evaluate_release(tmp_path / "run", config)["accuracy"] == pytest.approx(accuracy)
  predict_release(tmp_path / "run", config, tmp_path / "out.csv")
  rows = list(csv.DictReader((tmp_path / "out.csv").open()))
  run = prepare(config)
  groups = read_groups(config.data, run.eval_loader.source)
  assert len(rows) == len(groups["sex"]) == run.eval_loader.num_units
  ill = np.array([row["prediction"] == "1" for row in rows])
  assert np.mean(ill == (groups["age"] == "55 and above")) > 0.9
  inputs = run.eval_loader.source.gather(np.arange(len(rows)))["inputs"]
  probabilities = load_release(tmp_path / "run").predict(inputs)
  np.testing.assert_array_equal(probabilities[:, 1] > 0.5, ill)


class Crash(BaseException):
  """Stands for a process that ends at once."""


def test_going_on_with_another_unit_size_or_noise_is_refused_by_name(tmp_path, monkeypatch):
  file, folder = write(tmp_path / "table.csv"), tmp_path / "run"
  config, original = config_of(file), loop.Loop.step

  def step(self, state, index):
    if index == 2:
      raise Crash
    return original(self, state, index)

  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, "step", step)
    with pytest.raises(Crash):
      train(config, folder, progress=False)
  before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.name != ".lock")
  for changes, named in (
    ({"privacy__unit": "age"}, "privacy.unit was 'person', is 'age'"),
    ({"data__max_records_per_unit": 3}, "data.max_records_per_unit was 2, is 3"),
    ({"data__features": ["bp", "age"]}, "data.features was ['age', 'bp'], is ['bp', 'age']"),
  ):
    with pytest.raises(ValueError, match=re.escape(named)):
      train(config_of(file, **changes), folder, progress=False)
  # Under the same configuration: what it is computed to, and what the file holds.
  with monkeypatch.context() as patch:
    less = dataclasses.replace(prepare(config).mechanism, noise_multiplier=0.01)
    patch.setattr(
      "dp_jax.training.setup.prepare.make_mechanism", lambda *_: (make_spec(config), less)
    )
    with pytest.raises(ValueError, match=r"mechanism\.noise_multiplier was [\d.]+, is 0\.01;"):
      train(config, folder, progress=False)
  with file.open("a") as table:
    table.write("".join(f"\nq{i},30,90,0,f" for i in range(20)))
  with pytest.raises(ValueError, match=r"the records differ; .*num_units was \d+, is \d+\."):
    train(config, folder, progress=False)
  assert before == sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.name != ".lock")


def test_every_key_can_be_set_on_the_command_line(tmp_path):
  config = config_of(write(tmp_path / "table.csv"), train__steps=1)
  code, _, err = finish(start("train", *flags_of(config), f"--workdir={tmp_path / 'run'}"))
  assert code == 0, err
  assert json.loads((tmp_path / "run" / "config.json").read_text())["config"] == config.to_dict()


def test_on_private_data_a_malformed_cell_stops_nothing_and_shows_nowhere(tmp_path, capfd):
  file = write(tmp_path / "table.csv", malformed=3)
  config = config_of(file, data__declared="private", train__steps=2)
  train(config, tmp_path / "run", progress=False)
  assert capfd.readouterr() == ("", "")
  notes = json.loads((tmp_path / "run" / "private" / "bad_records.json").read_text())
  assert sum(len(split) for split in notes.values()) == 3
  assert lines(tmp_path / "run" / "private" / "metrics.jsonl")
  with pytest.raises(ValueError, match=r"record 0 of table.csv/.*column 'bp' holds what is no"):
    prepare(config_of(file, data__declared="public"))
  # Of private data strict says that there is one, and not what it holds.
  with pytest.raises(ValueError, match=r"record 0 of table.csv/\w+ is malformed") as error:
    prepare(config_of(file, data__declared="private", data__strict=True))
  assert "bp" not in str(error.value)


def test_keys_of_tables_are_refused_for_other_sources(tmp_path):
  for key, value in (("features", ["age"]), ("eval_fraction", 0.5), ("uncertain", "ones")):
    with pytest.raises(ValueError, match=rf"data\.{key}=.* is for the source csv"):
      small_config(**{f"data__{key}": value})
  with pytest.raises(ValueError, match=r"data\.eval_fraction=0.3 splits by unit"):
    prepare(config_of(tmp_path, privacy__unit="record", data__max_records_per_unit=1))
