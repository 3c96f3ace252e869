"""Several yes-or-no labels a record, some of them not known: the task, a run, its release."""

import csv
import dataclasses
import json

import jax
import numpy as np
import pytest
from support import small_config

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.runs.using import evaluate_release, predict_release
from dp_jax.statement.verify import verify_release
from dp_jax.training.release import load_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare

LABELS = ["edema", "fracture", "pneumonia"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
  """Each label is the sign of a feature; a third of the cells are uncertain or blank."""
  rng = np.random.default_rng(0)
  folder = tmp_path_factory.mktemp("table")
  for split in ("train", "test"):
    features = rng.uniform(-1, 1, (300, 3)).round(4)
    labels = np.where(features > 0, "1.0", "0.0").astype("U4")
    labels[rng.random(labels.shape) < 0.15] = "-1.0"
    labels[rng.random(labels.shape) < 0.15] = ""
    rows = [["a", "b", "c", *LABELS], *np.concatenate([features.astype(str), labels], 1).tolist()]
    (folder / f"{split}.csv").write_text("\n".join(map(",".join, rows)))
  return folder


def config_of(table, **changes):
  data = {
    "source": "csv", "path": str(table), "declared": "public", "features": ["a", "b", "c"],
    "feature_ranges": [[-1.0, 1.0]] * 3, "label_columns": LABELS,
  }  # fmt: skip
  values = {
    "model": {"name": "linear"}, "train__steps": 20, "train__learning_rate": 2.0,
    "privacy": {"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch"},
  }  # fmt: skip
  return small_config(data=data, **{**values, **changes})


def test_the_loss_is_the_mean_over_known_labels_and_then_over_records(table):
  run = prepare(config_of(table, task__kwargs={"label_smoothing": 0.1}))
  rng = np.random.default_rng(1)
  unit = {
    "inputs": rng.uniform(-1, 1, (4, 3)).astype(np.float32),
    "label": np.array([[1, 0, -1], [-1, -1, 1], [-1, -1, -1], [0, 0, 0]], np.float32),
    "record_mask": np.array([True, True, True, False]),
  }
  logits = unit["inputs"] @ run.params["head.kernel"] + run.params["head.bias"]
  p = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
  yes, no = -np.log(p), -np.log(1 - p)
  is_yes, is_no = 0.95 * yes + 0.05 * no, 0.95 * no + 0.05 * yes
  expected = ((is_yes[0, 0] + is_no[0, 1]) / 2 + is_yes[1, 2]) / 2
  loss = jax.jit(run.task.loss)({}, run.params, unit, jax.random.key(0))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_what_is_not_known_or_masked_moves_no_gradient(table):
  """A label that is not known may be anything; a record of none, or a masked one of NaN, is gone.

  And a unit of records of which nothing is known has the gradient zero.
  """
  run = prepare(config_of(table))
  gradient = jax.jit(jax.grad(run.task.loss, argnums=1))
  key = jax.random.key(0)
  inputs = np.array([[0.5, 0.2, 0.1], [0.3, -0.2, 0.9]], np.float32)
  labels = np.array([[1, -1, 0], [-1, -1, -1]], np.float32)
  mask = np.ones(2, bool)
  unit = {"inputs": inputs, "label": labels, "record_mask": mask}
  first = gradient({}, run.params, unit, key)
  masked = {**unit, "record_mask": np.array([True, False])}
  broken = {**masked, "inputs": inputs * np.array([[1], [np.nan]], np.float32)}
  for other in (masked, broken):
    np.testing.assert_array_equal(
      *(g["head.kernel"] for g in (first, gradient({}, run.params, other, key)))
    )
  assert not np.asarray(first["head.kernel"])[:, 1].any()
  nothing = {**unit, "label": np.full((2, 3), -1, np.float32)}
  assert not any(np.any(x) for x in gradient({}, run.params, nothing, key).values())


def test_both_engines_clip_it_alike(table):
  run = prepare(config_of(table))
  units = run.task.made_up_units(5, 2)
  assert units["label"].shape == (5, 2, 3) and set(np.unique(units["label"])) == {-1, 0, 1}
  sums = [
    jax.jit(clipped_grad(lambda *a: run.task.loss({}, *a), 0.1, engine=engine))(
      run.params, units, None, jax.random.split(jax.random.key(0), 5)
    )[0]["head.kernel"]
    for engine in ("vmap", "ghost")
  ]
  np.testing.assert_allclose(*sums, atol=1e-5)


@pytest.mark.parametrize("declared", ["public", "private"])
def test_a_run_and_its_release(table, tmp_path, declared):
  config = config_of(table)
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, declared=declared))
  result = train(config, tmp_path / "run", progress=False)
  release = tmp_path / "run" / "release"
  assert not verify_release(release).problems
  record = json.loads((release / "privacy.json").read_text())
  assert record["treated_as_public"]["class_names"] == LABELS
  if declared == "public":
    assert result.metrics["test"]["auroc"] > 0.95 and result.metrics["test"]["accuracy"] > 0.85
    assert evaluate_release(tmp_path / "run", config)["auroc"] > 0.95
  else:
    assert result.metrics == {}
    assert (tmp_path / "run" / "private" / "metrics.jsonl").exists()
  assert load_release(release).spec.task["multilabel"]
  unlabelled = tmp_path / "unlabelled"
  unlabelled.mkdir()
  (unlabelled / "test.csv").write_text("a,b,c\n0.9,-0.9,0.9\n-0.9,-0.9,-0.9\nx,0,0\n")
  new = dataclasses.replace(config.data, path=str(unlabelled), declared="private")
  predict_release(release, dataclasses.replace(config, data=new), tmp_path / "out.csv")
  rows = list(csv.DictReader((tmp_path / "out.csv").open()))
  assert [row["prediction"] for row in rows] == ["edema;pneumonia", "", ""]
  assert float(rows[0]["probability_edema"]) > 0.5 and rows[2]["probability_edema"] == ""


def test_one_label_is_not_several(table, tmp_path):
  train(config_of(table, train__steps=1), tmp_path / "run", progress=False)
  config = config_of(table)
  options = dataclasses.replace(
    config.data.options, label_columns=("edema",), class_names=tuple(LABELS), uncertain="ignore"
  )
  data = dataclasses.replace(config.data, options=options)
  with pytest.raises(ValueError, match=r"data.label_columns is \['edema'\], and was \['ed"):
    evaluate_release(tmp_path / "run", dataclasses.replace(config, data=data))
