"""What a model was trained with is taken from it where it is used, not from the caller."""

import csv
import dataclasses
import json
import logging

import numpy as np
import pytest
from support import classifier, flags_of, small_config

from dp_jax.cli import main
from dp_jax.config.run_config import Config
from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.data.sources.source import SourceInfo
from dp_jax.models.build import ModelSpec
from dp_jax.models.pretrained import weights
from dp_jax.runs.using import evaluate_release, held_out_loader, predict_release
from dp_jax.training.release import PARAMS, load_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.setup.reading import as_trained, check_source, reading_of

FEATURES = {
  "features": ["age", "dose"], "feature_ranges": [[20.0, 90.0], [0.0, 10.0]],
  "feature_defaults": [40.0, 1.0], "missing_indicators": True,
}  # fmt: skip


def _config(folder, **changes):
  data = {
    "source": "csv", "path": str(folder), "declared": "public", "label_columns": ["ill"],
    "class_names": ["no", "yes"], **FEATURES,
    **{k.removeprefix("data__"): changes.pop(k) for k in [*changes] if k.startswith("data__")},
  }  # fmt: skip
  values = {"train__steps": 6, "train__learning_rate": 1.0, "model": {"name": "linear"}}
  return small_config(data=data, privacy__sampling_rate=0.9, **{**values, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A table in which old age alone says who is ill, and a release of it; a few ages are missing."""
  folder, rng = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
  for split in ("train", "test"):
    ages, doses = rng.integers(20, 90, 150), rng.random(150) * 10
    lines = [f"{'' if i < 5 else a},{d:.2f},{('no', 'yes')[int(a > 55)]}"
             for i, (a, d) in enumerate(zip(ages, doses, strict=True))]  # fmt: skip
    (folder / f"{split}.csv").write_text("\n".join(["age,dose,ill", *lines]))
  config = _config(folder)
  accuracy = train(config, folder / "run", progress=False).metrics["test"]["accuracy"]
  assert accuracy > 0.8
  return config, folder / "run" / "release", accuracy


def _with(config, **changes):
  return Config.from_dict({**config.to_dict(), "data": {**config.data.to_dict(), **changes}})


def test_what_the_configuration_leaves_out_is_taken_from_the_release(trained, tmp_path):
  config, release, accuracy = trained
  bare = small_config(data={"source": "csv", "path": config.data.path, "declared": "public"})
  assert evaluate_release(release, bare)["accuracy"] == pytest.approx(accuracy)
  for name, given in (("bare", bare), ("full", config)):
    predict_release(release, given, tmp_path / name)
  assert (tmp_path / "bare").read_bytes() == (tmp_path / "full").read_bytes()
  assert {row["prediction"] for row in csv.DictReader((tmp_path / "bare").open())} == {"no", "yes"}


def test_held_out_records_of_which_none_can_be_read_are_no_evaluation(trained, tmp_path):
  config, release, _ = trained
  (tmp_path / "test.csv").write_text("age,dose,ill\n" + "old,1,yes\n" * 3)
  for declared, told in (("private", "is not told of private data"), ("public", "column 'age'")):
    other = _with(config, path=str(tmp_path), declared=declared)
    with pytest.raises(
      ValueError, match=f"none of the first 64 records of data.eval_split.*{told}"
    ):
      evaluate_release(release, other)
  # Without labels too they are told apart, row by row.
  predict_release(release, _with(config, path=str(tmp_path), declared="private"), tmp_path / "out")
  rows = list(csv.DictReader((tmp_path / "out").open()))
  assert [row["prediction"] for row in rows] == [""] * 3


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"features": ("dose", "age")}, r"data.features is \['dose', 'age'\], and was \['age', 'dose'"),
    (
      {"feature_ranges": ((20.0, 60.0), (0.0, 10.0))},
      r"ranges is \[\[20.0, 60.0\], .*90.0",
    ),
    (
      {"feature_defaults": (50.0, 1.0)},
      r"defaults is \[50.0, 1.0\], and was \[40.0, 1.0\]",
    ),
    ({"class_names": ("yes", "no")}, r"class_names is \['yes', 'no'\], and was \['no', 'yes'\]"),
    ({"label_columns": ("dose",)}, r"label_columns is \['dose'\], and was \['ill'\]"),
    ({"value_range": (0.0, 1.0)}, r"data.value_range is \[0.0, 1.0\], and was \[-1.0, 1.0\]"),
    ({"num_classes": 3}, "data.num_classes is 3, and was 2 in training"),
    ({"input_shape": (2,)}, r"data.input_shape is \[2\], and was \[4\] in training"),
  ],
)
def test_each_difference_is_refused_and_named(trained, tmp_path, changes, named):
  config, release, _ = trained
  other = _with(config, **changes)
  for use in (evaluate_release, lambda *a: predict_release(*a, tmp_path / "out.csv")):
    with pytest.raises(ValueError, match=named):
      use(release, other)
  assert not (tmp_path / "out.csv").exists()


def test_several_differences_are_named_together_and_the_exit_code_is_2(trained, tmp_path, capsys):
  config, release, _ = trained
  other = _with(config, features=("dose", "age"), class_names=("yes", "no"))
  for command, *more in (["evaluate"], ["predict", f"--out={tmp_path / 'out.csv'}"]):
    assert main([command, str(release), *flags_of(other), *more]) == 2
    told = capsys.readouterr().err
    assert "data.features is" in told and "data.class_names is" in told and told.count("\n") == 1


def test_the_statement_has_them_under_the_same_names(trained):
  config, release, _ = trained
  public = json.loads((release / "privacy.json").read_text())["treated_as_public"]
  spec = load_release(release).spec
  assert ModelSpec.from_json(spec.to_json()) == spec
  for name, value in {**FEATURES, "label_columns": ["ill"]}.items():
    assert public[name] == spec.reading[name] == value
  assert "path" not in str(spec.reading)
  # Mid-range where no default is declared, so that the same number may be declared later.
  bare = reading_of(_with(config, feature_defaults=None), prepare(config).loader.source)
  assert bare["feature_defaults"] == [55.0, 5.0]


def _images(**changes):
  values = {"source": "folder", "path": "x", "input_shape": [8, 8, 3], "resize": "stretch",
            "interpolation": "bicubic", **changes}  # fmt: skip
  return small_config(data=values)


class _Source:
  def __init__(self, **changes):
    values = {"name": "x/test", "num_records": 3, "input_shape": (8, 8, 3), "num_classes": 2,
              "value_range": (0.0, 255.0)}  # fmt: skip
    self.info = SourceInfo(**{**values, **changes})


def test_how_images_are_decoded_is_taken_from_the_release_too():
  config = _images()
  reading = reading_of(config, _Source())
  spec = classifier("linear", {}, (8, 8, 3), 2, (0.0, 255.0), ("a", "b"), reading=reading)
  bare = as_trained(spec, _images(resize="centre_crop", interpolation="bilinear")).data.options
  assert (bare.resize, bare.interpolation) == ("stretch", "bicubic")
  with pytest.raises(ValueError, match=r"data\.resize is none, and was stretch"):
    as_trained(spec, _images(resize="none"))
  # Arrays are not decoded: nothing of it is for them.
  arrays = small_config(data={"source": "npz", "path": "x"})
  assert as_trained(spec, arrays).data == arrays.data


def test_another_scale_or_another_model_of_features_is_refused():
  origin = {"weights_sha256": "ab", "preprocessing_sha256": "p"}
  features = {"input_shape": (4,), "value_range": (-1.0, 1.0)}
  config = small_config(data={"source": "npy", "path": "x"})
  reading = reading_of(config, _Source(origin=origin, **features))
  spec = classifier("linear", {}, (4,), 2, (-1.0, 1.0), reading=reading)
  check_source(spec, config.data, _Source(origin=origin, **features).info)
  check_source(spec, config.data, _Source(**features).info)  # says nothing of its model
  for changes, named in (
    ({**features, "origin": {**origin, "weights_sha256": "cd"}}, "weights_sha256 cd, not ab as in"),
    (
      {**features, "origin": {**origin, "preprocessing_sha256": "q"}},
      "sha256 q, not p as",
    ),
    ({**features, "value_range": (0.0, 255.0)}, r"range \[0.0, 255.0\], and the model was trained"),
  ):
    with pytest.raises(ValueError, match=named):
      check_source(spec, config.data, _Source(**changes).info)


def test_an_older_file_is_used_as_before_with_a_warning(trained, tmp_path, caplog):
  config, release, accuracy = trained
  spec, arrays = weights.load(release / PARAMS)
  old = dataclasses.replace(spec, reading={})
  assert "reading" not in old.to_json()
  (tmp_path / PARAMS).write_bytes(weights.to_bytes(arrays, old, declared="public"))
  caplog.set_level(logging.WARNING, "dp_jax")
  assert evaluate_release(tmp_path, config)["accuracy"] == pytest.approx(accuracy)
  assert "is not checked" in caplog.text


def test_what_may_be_meant_is_warned_of(trained, tmp_path, caplog):
  """Columns of a table in a format that names none; another share of the units as held out."""
  config, release, _ = trained
  caplog.set_level(logging.WARNING, "dp_jax")
  writer = ShardWriter(tmp_path / "npy", num_classes=2, class_names=("no", "yes"))
  writer.append("test", np.zeros((3, 4), np.float32), np.zeros(3, int))
  writer.close()
  shards = small_config(data={"source": "npy", "path": str(tmp_path / "npy")})
  held_out_loader(load_release(release), shards)
  assert "columns of a table, in the order age, dose" in caplog.text
  split = {"eval_fraction": 0.5, "seed": 1}
  reading = {**load_release(release).spec.reading, "held_out_by": [0.5, 0, "person"]}
  spec = dataclasses.replace(load_release(release).spec, reading=reading)
  as_trained(spec, _with(config, **split))
  assert "holds records that the model was trained on" in caplog.text


def test_how_a_file_writes_that_there_is_no_value_is_taken_from_the_release(tmp_path, caplog):
  """As a number, -9 would be the lowest age; another file may write it otherwise, if it is said."""
  rows = [f"{(-9, 30, 80)[i % 3]},{i % 9},{('no', 'yes')[i % 3 != 1]}" for i in range(90)]
  for split in ("train", "test"):
    (tmp_path / f"{split}.csv").write_text("\n".join(["age,dose,ill", *rows]))
  config = _config(tmp_path, data__missing_values=["-9"])
  trained = train(config, tmp_path / "run", progress=False).metrics["test"]["accuracy"]
  release = tmp_path / "run" / "release"
  caplog.set_level(logging.WARNING, "dp_jax")
  bare = small_config(data={"source": "csv", "path": str(tmp_path), "declared": "public"})
  assert evaluate_release(release, bare)["accuracy"] == pytest.approx(trained)
  assert "missing_values" not in caplog.text
  spec = load_release(release).spec
  assert as_trained(spec, _with(config, missing_values=("x",))).data.missing_values == ("x",)
  assert "missing_values is ['x'], and was ['-9'] in training" in caplog.text


def test_another_column_of_images_is_refused():
  images = {"image_column": "front", "features": None, "input_shape": [8, 8, 3]}
  table = {"label_columns": ["ill"], "class_names": ["a", "b"]}
  config = _images(source="csv", **images, **table)
  spec = classifier("linear", {}, (8, 8, 3), 2, (0.0, 255.0), ("a", "b"),
                   reading=reading_of(config, _Source()))  # fmt: skip
  bare = as_trained(spec, small_config(data={"source": "csv", "path": "x"})).data.options
  assert (bare.image_column, bare.resize, bare.label_columns) == ("front", "stretch", ("ill",))
  with pytest.raises(ValueError, match=r"data\.image_column is side, and was front in training"):
    as_trained(spec, _with(config, image_column="side"))


def test_starting_weights_of_other_inputs_are_refused(trained):
  config, release, _ = trained
  start = dataclasses.replace(config.model, weights=str(release / PARAMS))
  prepare(dataclasses.replace(config, model=start))
  for changes, named in (
    (
      {"features": ("dose", "age"), "feature_ranges": ((0.0, 10.0), (20.0, 90.0))},
      r"were trained on other inputs: data.features is \['dose'",
    ),
    ({"feature_ranges": ((20.0, 60.0), (0.0, 10.0))}, "trained on other inputs: data.feature_ran"),
  ):
    with pytest.raises(ValueError, match=named):
      prepare(dataclasses.replace(_with(config, **changes), model=start))
