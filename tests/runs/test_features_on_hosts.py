"""`dp-jax features` of two processes: each writes some shards, together what one writes."""

import re
import signal
import time

import jax
import numpy as np
import pytest
from PIL import Image
from support import ROOT, classifier, finish, free_port, start

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.data.sources.npy_resume import ResumableShards
from dp_jax.data.sources.npy_shards import NpyShards
from dp_jax.models.functional import split
from dp_jax.models.pretrained import weights
from dp_jax.runs import extract_features

SPEC = classifier(
  "vit", {"size": "ti16", "depth": 1, "width": 8, "heads": 2, "patch": 4}, (8, 8, 3), 5, (0.0, 1.0)
)
COUNT, PER_SHARD = 60, 2


pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  """A folder of images, and the weights of a tiny transformer."""
  folder = tmp_path_factory.mktemp("inputs")
  rng = np.random.default_rng(0)
  for part in ("train", "test"):
    for name in ("a", "b"):
      (folder / "images" / part / name).mkdir(parents=True)
      for index in range(COUNT):
        pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / part / name / f"{index:03d}.png")
  content = weights.to_bytes(split(SPEC.build(3))[1], SPEC, declared="public", ancestry=())
  (folder / "vit.safetensors").write_bytes(content)
  return folder


def _command(inputs, out, *more):
  values = {
    "data.path": inputs / "images", "data.eval_split": "test", "data.input_shape": (8, 8, 3),
    "backbone.name": "vit", "backbone.weights": inputs / "vit.safetensors",
    "backbone.records_per_shard": PER_SHARD, "backbone.microbatch_size": 2,
  }  # fmt: skip
  return [
    "features", f"--config={ROOT / 'configs' / 'imagenet_features.py'}", f"--out={out}",
    *(f"--config.{name}={value}" for name, value in values.items()), *more,
  ]  # fmt: skip


def _start_two(inputs, out, *more, second=()):
  port = free_port()
  return [
    start(*_command(
      inputs, out, f"--coordinator=127.0.0.1:{port}", "--num_processes=2",
      f"--process_id={rank}", "--heartbeat_seconds=10", *more, *(second if rank else ()),
    ))
    for rank in range(2)
  ]  # fmt: skip


def _content(folder):
  return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


@pytest.fixture(scope="module")
def one(inputs, tmp_path_factory):
  """What one process writes."""
  out = tmp_path_factory.mktemp("one") / "features"
  code, _, errors = finish(start(*_command(inputs, out)))
  assert code == 0, errors
  return out


def test_one_of_two_is_ended_at_once_and_the_same_commands_go_on(inputs, one, tmp_path):
  out = tmp_path / "features"
  processes = _start_two(inputs, out)
  deadline = time.monotonic() + 200
  while not (out / "train_labels_00003.npy").exists() and time.monotonic() < deadline:
    assert all(p.poll() is None for p in processes), [finish(p) for p in processes]
    time.sleep(0.001)
  processes[1].send_signal(signal.SIGTERM)
  code, _, errors = finish(processes[0])
  assert finish(processes[1])[0] == -signal.SIGTERM
  assert code != 0, errors
  done = {path.name: path.stat().st_mtime_ns for path in out.glob("*_labels_*.npy")}
  assert 2 <= len(done) < 2 * COUNT and not (out / "manifest.json").exists()
  again = [finish(process) for process in _start_two(inputs, out)]
  assert [code for code, _, _ in again] == [0, 0], again
  assert again[0][1].count("train on them with") == 1 and "train" not in again[1][1]
  assert _content(out) == _content(one)
  assert {name: (out / name).stat().st_mtime_ns for name in done} == done
  assert not list(out.glob(".*.tmp")) and len(NpyShards(str(out), "train")) == 2 * COUNT


def test_hosts_that_differ_stop_before_anything_is_written(inputs, tmp_path):
  second = ("--config.data.crop_fraction=0.5",)
  for process in _start_two(inputs, tmp_path / "out", second=second):
    code, _, errors = finish(process)
    assert code == 2 and "host 1 differs from host 0" in errors
    assert re.search(r"data\.crop_fraction is 0\.5, not 1\.0", errors)
  assert not list(tmp_path.iterdir())


def test_a_host_writes_its_share_and_the_first_completes_no_less_than_all(
  inputs, tmp_path, monkeypatch
):
  """As the second of two hosts, with a first that does nothing."""
  config = FeaturesConfig.from_dict({
    "data": {"source": "folder", "path": str(inputs / "images"), "input_shape": [8, 8, 3]},
    "backbone": {
      "name": "vit", "weights": str(inputs / "vit.safetensors"), "records_per_shard": 50,
      "microbatch_size": 8,
    },
  })  # fmt: skip
  extraction = extract_features.prepare_features(config)
  shards = ResumableShards(tmp_path / "out", extraction.manifest, private=True)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(extract_features, "broadcast", lambda value: value)

  def gone(seconds):
    raise KeyboardInterrupt

  monkeypatch.setattr(extract_features.time, "sleep", gone)
  with shards.open():
    with pytest.raises(KeyboardInterrupt):
      extract_features._write_shards(extraction, shards, progress=False)
    assert sorted(path.name for path in (tmp_path / "out").glob("*_labels_*.npy")) == [
      "test_labels_00000.npy", "test_labels_00002.npy", "train_labels_00001.npy",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="lacks shards of 'train'"):
      shards.finish()
  assert not (tmp_path / "out" / "manifest.json").exists()
