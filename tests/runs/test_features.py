"""`dp-jax features`, then `dp-jax train` on what it wrote, with a real public backbone."""

import json
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image
from support import ROOT, finish, flags_of, lines, small_config, start

from dp_jax.cli import main
from dp_jax.config.features_config import FeaturesConfig
from dp_jax.config.files import base_features_config
from dp_jax.data.sources.npy_shards import NpyShards
from dp_jax.runs import extract_features as features
from dp_jax.runs.extract_features import BAD_LABEL, extract_features
from dp_jax.training.setup.prepare import prepare

CLASSES = ("flower", "temple")


def images(folder: Path, count: int, splits=("train", "test"), side=48) -> Path:
  """Two classes: random parts of two photographs, `count` of each in each split."""
  rng = np.random.default_rng(0)
  for name, photograph in zip(CLASSES, ("flower.jpg", "china.jpg"), strict=True):
    pixels = load_sample_image(photograph)
    for split in splits:
      (folder / split / name).mkdir(parents=True)
      for index in range(count):
        top, left = (rng.integers(0, length - 200) for length in pixels.shape[:2])
        part = Image.fromarray(pixels[top : top + 200, left : left + 200]).resize((side, side))
        part.save(folder / split / name / f"{index:04d}.jpg", quality=90)
  return folder


def config(path: Path, **changes) -> FeaturesConfig:
  """Of a folder of images; `backbone__size="lite2"` changes backbone.size."""
  values: dict = {
    "data": {"source": "folder", "path": str(path), "input_shape": [32, 32, 3]},
    "backbone": {"records_per_shard": 8, "microbatch_size": 8},
  }
  for name, value in changes.items():
    section, _, key = name.partition("__")
    values[section][key] = value
  return FeaturesConfig.from_dict(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return images(tmp_path_factory.mktemp("images"), 10)


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
  out = tmp_path_factory.mktemp("features") / "out"
  return out, extract_features(config(folder), out, progress=False)


def test_every_record_has_its_features_label_and_place(folder, written):
  out, manifest = written
  assert manifest["splits"] == {"train": [8, 8, 4], "test": [8, 8, 4]}
  assert manifest["class_names"] == list(CLASSES) and manifest["input_shape"] == [1280]
  source = NpyShards(str(out), "train")
  rows = source.gather(np.arange(20))
  assert rows["inputs"].dtype == np.float16 and np.isfinite(rows["inputs"]).all()
  np.testing.assert_array_equal(rows["label"], [0] * 10 + [1] * 10)
  extraction = features.prepare_features(config(folder, backbone__dtype="float32"))
  raw = [extraction.sources["train"][index]["inputs"] for index in range(20)]
  expected = extraction.backbone.forward(extraction.backbone.arrays, np.stack(raw))
  np.testing.assert_allclose(rows["inputs"], expected, rtol=2e-3, atol=2e-4)


def test_the_manifest_tells_where_the_features_come_from(written):
  out, manifest = written
  assert json.loads((out / "manifest.json").read_text()) == manifest
  origin = manifest["origin"]
  assert origin["weights_sha256"].startswith("57934424")
  assert origin["preprocessing"]["resize"] == "centre_crop"
  assert len(origin["preprocessing_sha256"]) == 64 and origin["declared"] == "private"
  assert stat.S_IMODE(out.stat().st_mode) == 0o700
  modes = {stat.S_IMODE(path.stat().st_mode) for path in out.glob("[!.]*")}
  assert modes == {0o600}


def _content(folder):
  return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def test_features_of_private_images_are_private(written, tmp_path, capsys):
  """Else their accuracy would be shown, and a checkpoint chosen by it."""
  out, _ = written
  data = {"source": "npy", "path": str(out), "declared": "public"}
  command = flags_of(small_config(data=data, model={"name": "linear"}))
  assert main(["train", *command, f"--workdir={tmp_path / 'run'}"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "data.declared='public', but the manifest" in line and "set data.declared" in line
  assert not (tmp_path / "run").exists()
  prepare(small_config(data={**data, "declared": "private"}, model={"name": "linear"}))


@pytest.mark.parametrize("declared", ["private", "public"])
def test_the_number_of_private_records_is_not_printed(
  folder, tmp_path, capsys, monkeypatch, declared
):
  """P15: nor a hash of them."""
  made = features.prepare_features(config(folder, data__declared=declared)).manifest
  monkeypatch.setattr(features, "extract_features", lambda *_: made)
  where = [f"--config={ROOT / 'configs' / 'imagenet_features.py'}", f"--out={tmp_path}"]
  texts = []
  for more in ([], ["--json"]):
    assert main(["features", *where, *more]) == 0
    texts.append(capsys.readouterr().out)
  told = "20 train" in texts[0], "[8, 8, 4]" in texts[1], "source_sha256" in texts[1]
  assert told == (declared == "public",) * 3, texts


def test_stopped_and_resumed_gives_identical_files(folder, written, tmp_path, monkeypatch):
  whole = features._shard
  calls = []

  def stopped(*arguments):
    calls.append(arguments)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return whole(*arguments)

  monkeypatch.setattr(features, "_shard", stopped)
  with pytest.raises(KeyboardInterrupt):
    extract_features(config(folder), tmp_path / "out", progress=False)
  extract_features(config(folder), tmp_path / "out", progress=False)
  assert len(calls) == 3 + 4  # two shards were kept
  assert _content(tmp_path / "out") == _content(written[0])
  extract_features(config(folder), tmp_path / "out", progress=False)  # nothing is left to do
  assert len(calls) == 7


@pytest.mark.parametrize(("change", "value", "named"), [
  ("backbone__layers", ["block0"], r"origin\.preprocessing\.layers"),
  ("data__crop_fraction", 0.5, "crop_fraction is 1.0 there and 0.5 here"),
  ("backbone__records_per_shard", 9, "how many of them a shard holds"),
])  # fmt: skip
def test_a_folder_of_other_features_is_refused_and_kept(folder, written, change, value, named):
  before = _content(written[0])
  with pytest.raises(ValueError, match=named):
    extract_features(config(folder, **{change: value}), written[0], progress=False)
  assert _content(written[0]) == before


def test_a_record_that_cannot_be_read_has_no_weight(folder, tmp_path):
  broken = images(tmp_path / "images", 4, side=32)
  (broken / "train" / "flower" / "0001.jpg").write_bytes(b"no image")
  out = tmp_path / "out"
  extract_features(config(broken), out, progress=False)
  rows = NpyShards(str(out), "train").gather(np.arange(8))
  np.testing.assert_array_equal(rows["label"], [0, BAD_LABEL, 0, 0, 1, 1, 1, 1])
  assert not rows["inputs"][1].any() and rows["inputs"][[0, 2]].any(axis=1).all()
  noted = json.loads((out / "train_problems_00000.json").read_text())
  assert list(noted) == ["1"] and stat.S_IMODE((out / "train_problems_00000.json").stat().st_mode)
  with pytest.raises(ValueError, match="record 1 of folder/train"):
    extract_features(config(broken, data__declared="public"), tmp_path / "public", progress=False)


class _WithColumn:
  def __init__(self, source):
    self._source = source

  def __getattr__(self, name):
    return getattr(self._source, name)

  def __len__(self):
    return len(self._source)

  def column(self, name):
    if name != "person":
      raise ValueError(f"no column {name!r}")
    return np.array([f"p{index // 2}" for index in range(len(self))])


def test_columns_stay_beside_the_features(folder, tmp_path, monkeypatch):
  opened = features.open_split
  monkeypatch.setattr(features, "open_split", lambda *a, **k: _WithColumn(opened(*a, **k)))
  with pytest.raises(ValueError, match="no column 'patient'"):
    extract_features(config(folder, backbone__columns=["patient"]), tmp_path / "no", progress=False)
  assert not (tmp_path / "no").exists()
  out = tmp_path / "out"
  extract_features(config(folder, backbone__columns=["person"]), out, progress=False)
  source = NpyShards(str(out), "test")
  assert list(source.column("person"))[:3] == ["p0", "p0", "p1"] and len(source) == 20


@pytest.mark.parametrize(("change", "value", "named"), [
  ("backbone__microbatch_size", 0, "backbone.microbatch_size=0"),
  ("backbone__sizes", 0, "unknown key config.backbone.sizes; did you mean 'size'"),
  ("data__source", "", "data.source"),
  ("backbone__dtype", "float64", "'float16', 'bfloat16', 'float32'"),
])  # fmt: skip
def test_a_wrong_configuration_is_refused(folder, change, value, named):
  with pytest.raises(ValueError, match=named):
    config(folder, **{change: value})


def test_a_config_file_starts_from_every_key():
  values = base_features_config().to_dict()
  values["data"]["source"] = "folder"
  assert FeaturesConfig.from_dict(values).backbone.size == "lite0"


def test_killed_resumed_and_trained_on_end_to_end(tmp_path, monkeypatch):
  """Through the command line: SIGKILL half way, the same command again, then a private head."""
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
  path, out = images(tmp_path / "images", 60), tmp_path / "features"
  arguments = [
    "features", f"--config={ROOT / 'configs' / 'imagenet_features.py'}", f"--out={out}",
    f"--config.data.path={path}", "--config.data.eval_split=test",
    "--config.data.input_shape=(32,32,3)", "--config.backbone.size=lite0",
    "--config.backbone.records_per_shard=5", "--config.backbone.microbatch_size=5",
    "--config.data.declared=public",
  ]  # fmt: skip
  process = start(*arguments)
  deadline = time.monotonic() + 200
  while not (out / "train_labels_00001.npy").exists() and time.monotonic() < deadline:
    assert process.poll() is None, finish(process)
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  finish(process)
  kept = {p.name: p.stat().st_mtime_ns for p in out.glob("train_labels_*.npy")}
  assert 2 <= len(kept) < 24 and not (out / "manifest.json").exists()
  code, text, errors = finish(start(*arguments))
  assert code == 0, errors
  assert "1280 features" in text
  assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
  assert len(NpyShards(str(out), "train")) == 120
  workdir = tmp_path / "run"
  code, text, errors = finish(start(
    "train", f"--config={ROOT / 'configs' / 'imagenet_head_single_step.py'}",
    f"--workdir={workdir}", f"--config.data.path={out}", "--config.data.eval_split=test",
    "--config.data.declared=public", "--config.privacy.epsilon=8", "--config.privacy.delta=1e-3",
    "--json",
  ))  # fmt: skip
  assert code == 0, errors
  result = json.loads(text.splitlines()[-1])
  assert result["metrics"]["test"]["accuracy"] >= 0.9 and result["steps"] == 1
  assert lines(workdir / "private" / "training.jsonl")[0]["loss"] == pytest.approx(np.log(2))
