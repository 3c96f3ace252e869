"""Training, evaluation and prediction on sources whose records lie in files."""

import csv
import json

import datasets
import numpy as np
import pytest
from PIL import Image
from support import key_file, small_config

from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.runs.using import evaluate_release, predict_release
from dp_jax.training.release import load_release
from dp_jax.training.run import train

CLASSES = ("dark", "light")
COUNTS = {"train": 24, "test": 12}


def _write_folder(root, *, seed=0):
  """Dark and light images of different sizes."""
  rng = np.random.default_rng(seed)
  for split, count in COUNTS.items():
    for i in range(count):
      label = i % 2
      size = (int(rng.integers(8, 20)), int(rng.integers(8, 20)), 3)
      image = rng.integers(128 * label, 128 * (label + 1), size, np.uint8)
      file = root / split / CLASSES[label] / f"{i:03d}.jpg"
      file.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(image).save(file, "JPEG", quality=90)
  return root


def _write_shards(root):
  rng = np.random.default_rng(0)
  writer = ShardWriter(root, num_classes=2, class_names=CLASSES, records_per_shard=10)
  for split, count in COUNTS.items():
    labels = np.arange(count) % 2
    features = rng.normal(size=(count, 6)) + labels[:, None]
    writer.append(split, features.astype(np.float16), labels)
  writer.close()
  return root


def _write_data_set(root):
  """The images of `_write_folder`, as a Hugging Face data set."""
  datasets.disable_progress_bars()
  features = datasets.Features(
    {"scan": datasets.Image(), "finding": datasets.ClassLabel(names=list(CLASSES))}
  )
  folder = _write_folder(root / "images")
  splits = {}
  for split in COUNTS:
    files = sorted((folder / split).rglob("*.jpg"))
    columns = {"scan": [*map(str, files)], "finding": [file.parent.name for file in files]}
    splits[split] = datasets.Dataset.from_dict(columns, features=features)
  datasets.DatasetDict(splits).save_to_disk(str(root / "saved"))
  return root / "saved"


def _config(source, root, **changes):
  data = {"source": source, "path": str(root), "declared": "public", **changes.pop("data", {})}
  if source in ("folder", "hf"):
    data["input_shape"] = [8, 8, 3]
  model = (
    {"name": "linear"}
    if source == "npy"
    else {"kwargs": {"widths": [4], "strides": [2], "groups": 2}}
  )
  steps = {"steps": 3, "learning_rate": 0.1, "microbatch_size": 8}
  return small_config(data=data, model=model, train=steps, **changes)


@pytest.mark.parametrize(
  ("source", "write"),
  [("folder", _write_folder), ("npy", _write_shards), ("hf", _write_data_set)],
)
def test_train_evaluate_and_predict(tmp_path, source, write):
  config = _config(source, write(tmp_path / "data"))
  result = train(config, tmp_path / "run", test_key_file=key_file(tmp_path), progress=False)
  assert result.metrics["test"]["accuracy"] is not None
  record = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
  text = json.dumps(record)
  assert "dark" in text and str(tmp_path) not in text  # the list of classes is treated as public
  again = evaluate_release(tmp_path / "run" / "release", config)
  assert again["accuracy"] == pytest.approx(result.metrics["test"]["accuracy"])
  predict_release(tmp_path / "run" / "release", config, tmp_path / "out.csv")
  rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
  assert len(rows) == COUNTS["test"] and {row["prediction"] for row in rows} <= {*CLASSES}
  release = load_release(tmp_path / "run")
  assert release.task.class_names == CLASSES
  inputs = np.zeros((2, *release.task.input_shape), np.float32)
  assert release.predict(inputs).shape == (2, 2)


def test_an_evaluation_split_without_a_class_numbers_them_alike(tmp_path):
  root = _write_folder(tmp_path / "data")
  for file in (root / "test" / "dark").iterdir():
    file.unlink()
  (root / "test" / "dark").rmdir()
  config = _config("folder", root)
  result = train(config, tmp_path / "run", test_key_file=key_file(tmp_path), progress=False)
  details = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(details)["metrics"]["per_class_accuracy"][0] is None
  assert evaluate_release(tmp_path / "run", config)["loss"] == result.metrics["test"]["loss"]
  (root / "test" / "other").mkdir()
  with pytest.raises(ValueError, match="the folder 'other', which is not among the classes"):
    evaluate_release(tmp_path / "run", config)


def test_a_corrupt_image_stops_public_runs_and_is_noted_in_private_ones(tmp_path):
  root = _write_folder(tmp_path / "data")
  (root / "train" / "dark" / "004.jpg").write_bytes(b"no image")
  privacy = {"epsilon": 4.0, "delta": 1e-3, "sampling": "full_batch"}
  public, private = (
    _config("folder", root, data={"declared": declared}, privacy=privacy)
    for declared in ("public", "private")
  )
  with pytest.raises(ValueError, match="record 2 of folder/train: cannot be decoded"):
    train(public, tmp_path / "public", progress=False)
  train(private, tmp_path / "run", test_key_file=key_file(tmp_path), progress=False)
  notes = json.loads((tmp_path / "run" / "private" / "bad_records.json").read_text())
  assert [*notes["train"]] == ["2"] and not notes["eval"]
