"""What `dp-jax features` keeps: bfloat16, numbers beyond a dtype, several labels; and its use."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from support import key_file, small_config

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.data.sources.npy_shards import NpyShards
from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.models.pretrained.ancestry import Ancestor
from dp_jax.models.pretrained.backbones import Backbone
from dp_jax.runs import extract_features as features
from dp_jax.runs.extract_features import BAD_LABEL, extract_features
from dp_jax.solvers.feature_units import Rows, array_data
from dp_jax.statement.verify import verify_release
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.zero_head import head_at_zero

LABELS = ["edema", "fracture", "pneumonia"]
COUNT = 24


@pytest.fixture(autouse=True)
def tiny_backbone(monkeypatch):
  """The mean of each channel, and ten times its square: up to 650,250, beyond float16."""

  def load(*_, **__):
    def forward(arrays, inputs):
      means = inputs.astype(jnp.float32).mean(axis=(1, 2))
      return jnp.concatenate([means * arrays["scale"], 10 * means**2], axis=1)

    lineage = (Ancestor("means", "ab" * 32, protected=False, declared="public"),)
    return Backbone(
      {"scale": jnp.float32(0.01)}, "ab" * 32, (), 6, forward, {"layers": ["means"]}, lineage
    )

  monkeypatch.setattr(features, "load_backbone", load)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
  """A table of images of one colour each; three labels say which channels are strong."""
  rng = np.random.default_rng(0)
  folder = tmp_path_factory.mktemp("scans")
  for split in ("train", "test"):
    colours = rng.integers(0, 250, (COUNT, 3))
    labels = np.where(colours > 125, "1", "0").astype("U2")
    labels[rng.random(labels.shape) < 0.2] = "-1"
    lines = [",".join(["path", *LABELS])]
    for index, (colour, label) in enumerate(zip(colours, labels, strict=True)):
      Image.new("RGB", (8, 8), tuple(map(int, colour))).save(folder / f"{split}{index}.png")
      lines.append(",".join([f"{split}{index}.png", *label]))
    (folder / f"{split}.csv").write_text("\n".join(lines))
  return folder


def config(scans, *, declared="private", dtype="float32", **backbone):
  return FeaturesConfig.from_dict({
    "data": {
      "source": "csv", "path": str(scans), "image_column": "path", "image_root": str(scans),
      "input_shape": [8, 8, 3], "label_columns": LABELS, "declared": declared,
    },
    "backbone": {"dtype": dtype, "records_per_shard": 10, "microbatch_size": 8, **backbone},
  })  # fmt: skip


def _rows(folder, split="train"):
  return NpyShards(str(folder), split).gather(np.arange(COUNT))


def test_bfloat16_is_the_rounded_feature_and_resumes(scans, tmp_path, monkeypatch):
  extract_features(config(scans), tmp_path / "float32", progress=False)
  extract_features(config(scans, dtype="bfloat16"), tmp_path / "whole", progress=False)
  exact = _rows(tmp_path / "float32")["inputs"]
  found = _rows(tmp_path / "whole")["inputs"]
  assert found.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(found, exact.astype(ml_dtypes.bfloat16))
  assert np.load(tmp_path / "whole" / "train_inputs_00000.npy").dtype == np.uint16
  original, calls = features._shard, []

  def stopped(*arguments):
    calls.append(arguments)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return original(*arguments)

  monkeypatch.setattr(features, "_shard", stopped)
  again = config(scans, dtype="bfloat16")
  with pytest.raises(KeyboardInterrupt):
    extract_features(again, tmp_path / "parts", progress=False)
  extract_features(again, tmp_path / "parts", progress=False)
  whole, parts = (
    {path.name: path.read_bytes() for path in (tmp_path / name).glob("[!.]*")}
    for name in ("whole", "parts")
  )
  assert whole == parts
  with pytest.raises(ValueError, match="input_dtype is 'bfloat16' there and 'float16' here"):
    extract_features(config(scans, dtype="float16"), tmp_path / "whole", progress=False)


def test_a_feature_that_the_dtype_does_not_hold_is_an_error_on_public_data(scans, tmp_path):
  with pytest.raises(ValueError, match=r"record \d+ of .* not within what float16 holds: set"):
    extract_features(
      config(scans, declared="public", dtype="float16"), tmp_path / "public", progress=False
    )
  extract_features(
    config(scans, declared="public", dtype="bfloat16"), tmp_path / "wide", progress=False
  )


def test_on_private_data_it_is_cut_off_and_noted_there_alone(scans, tmp_path, caplog, capsys):
  """An error would tell of a record."""
  extract_features(config(scans), tmp_path / "exact", progress=False)
  extract_features(config(scans, dtype="float16"), tmp_path / "cut", progress=False)
  exact, cut = (_rows(tmp_path / name)["inputs"] for name in ("exact", "cut"))
  np.testing.assert_array_equal(cut, np.minimum(exact, np.finfo(np.float16).max).astype(np.float16))
  beyond = np.flatnonzero((exact > np.finfo(np.float16).max).any(axis=1))
  assert 0 < len(beyond) < COUNT
  noted = {}
  for path in (tmp_path / "cut").glob("train_problems_*.json"):
    noted |= json.loads(path.read_text())
  assert sorted(map(int, noted)) == list(beyond)
  assert not caplog.text and "".join(capsys.readouterr()) == ""


def test_several_labels_are_kept_and_trained_on(scans, tmp_path):
  content = (scans / "train3.png").read_bytes()
  (scans / "train3.png").write_bytes(b"no image")
  try:
    extract_features(config(scans), tmp_path / "features", progress=False)
  finally:
    (scans / "train3.png").write_bytes(content)
  table = [line.split(",")[1:] for line in (scans / "train.csv").read_text().splitlines()[1:]]
  expected = np.array(table, np.float32)
  expected[3] = BAD_LABEL
  rows = _rows(tmp_path / "features")
  np.testing.assert_array_equal(rows["label"], expected)
  assert not rows["inputs"][3].any()
  manifest = json.loads((tmp_path / "features" / "manifest.json").read_text())
  assert manifest["class_names"] == LABELS and manifest["num_classes"] == 3
  run = small_config(
    data={"source": "npy", "path": str(tmp_path / "features")}, model={"name": "linear"},
    privacy={"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch"}, train__steps=2,
  )  # fmt: skip
  train(run, tmp_path / "run", progress=False)
  assert not verify_release(tmp_path / "run" / "release").problems
  record = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
  assert record["treated_as_public"]["class_names"] == LABELS
  assert load_file(tmp_path / "run" / "release" / "params.safetensors")["head.kernel"].shape == (
    6, 3
  )  # fmt: skip
  prepared = prepare(run)
  assert type(prepared.task.task).__name__ == "MultiLabel"
  unit = {name: x[0] for name, x in prepared.loader.load(np.array([3]), 1)[0].items()}
  loss = jax.grad(prepared.task.loss, argnums=1)
  gradient = loss({}, prepared.params, unit, jax.random.key(0))
  assert not any(np.any(x) for x in gradient.values())


@pytest.mark.parametrize("std", [0.0, 0.01])
def test_training_on_bfloat16_is_training_on_the_same_numbers(tmp_path, std):
  """By the closed form (from zero) and by the loop: bits of the release."""
  rng = np.random.default_rng(1)
  rows = rng.standard_normal((200, 6), np.float32).astype(ml_dtypes.bfloat16)
  labels = rng.integers(0, 3, 200)
  released = []
  for dtype in (ml_dtypes.bfloat16, np.float32):
    folder = tmp_path / np.dtype(dtype).name
    writer = ShardWriter(folder, num_classes=3, records_per_shard=70)
    for split in ("train", "test"):
      writer.append(split, rows.astype(dtype), labels)
    writer.close()
    config = small_config(
      data={"source": "npy", "path": str(folder), "declared": "public"},
      model={"name": "linear", "head_init_std": std}, train__steps=1,
      privacy={"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch"},
    )  # fmt: skip
    assert (head_at_zero(prepare(config)) is not None) == (std == 0)
    workdir = tmp_path / f"{np.dtype(dtype).name}_run"
    train(config, workdir, test_key_file=key_file(tmp_path), progress=False)
    released.append((workdir / "release" / "params.safetensors").read_bytes())
  assert released[0] == released[1]


def test_the_statement_names_the_model_that_made_the_features(tmp_path):
  """And says what was said of its weights: here, that guarantees add up."""
  warning = "the starting weights are a private release themselves"
  origin = {
    "weights": "runs/a.safetensors",
    "weights_sha256": "12ab",
    "weights_warnings": [warning],
  }
  writer = ShardWriter(tmp_path / "features", num_classes=3, origin=origin)
  rng = np.random.default_rng(1)
  for split in ("train", "test"):
    writer.append(split, rng.standard_normal((200, 6), np.float32), rng.integers(0, 3, 200))
  writer.close()
  config = small_config(
    data={"source": "npy", "path": str(tmp_path / "features")}, train__steps=1,
    model={"name": "linear", "head_init_std": 0.0},
    privacy={"epsilon": 8.0, "delta": 1e-3, "sampling": "full_batch"},
  )  # fmt: skip
  train(config, tmp_path / "run", progress=False)
  found = verify_release(tmp_path / "run" / "release")
  assert not found.problems, str(found)
  record = found.record
  assert record["pretrained_weights"] == (
    "a.safetensors sha256 12ab, of the model that made the features"
  )
  assert warning in record["warnings"]
  assert any("starting weights were trained on" in each for each in record["not_covered"])


def test_a_solver_sees_the_same_rows_of_bfloat16():
  rng = np.random.default_rng(1)
  rows = rng.standard_normal((50, 6), np.float32).astype(ml_dtypes.bfloat16)
  labels = rng.integers(0, 3, 50)
  found = [
    next(iter(Rows(array_data(rows.astype(dtype), labels, 3))))[0]["inputs"]
    for dtype in (ml_dtypes.bfloat16, np.float32)
  ]
  assert found[0].dtype == jnp.float32
  np.testing.assert_array_equal(*found)
