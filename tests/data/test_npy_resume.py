"""Shards that are written one by one: kept when the writer stops, never of two minds."""

import json
import multiprocessing
import os
import stat

import numpy as np
import pytest

from dp_jax.data.sources.npy_resume import ResumableShards
from dp_jax.data.sources.npy_shards import NpyShards

COUNTS = [4, 4, 2]
MANIFEST = {
  "input_shape": [3], "input_dtype": "float16", "num_classes": 5, "class_names": [],
  "value_range": [-1.0, 1.0], "columns": ["person"], "splits": {"train": COUNTS},
  "origin": {"weights_sha256": "abc"},
}  # fmt: skip


def _arrays(shard):
  rng = np.random.default_rng(shard)
  count = COUNTS[shard]
  return {
    "inputs": rng.standard_normal((count, 3)).astype(np.float16),
    "labels": rng.integers(0, 5, count, np.int32),
    "person": np.array([f"p{i}" for i in range(count)]),
  }


def _write(folder, shards, *, private=True, manifest=MANIFEST, finish=False):
  writer = ResumableShards(folder, manifest, private=private)
  with writer.open():
    for shard in shards:
      assert not writer.has("train", shard)
      writer.write("train", shard, _arrays(shard))
    if finish:
      writer.finish()
  return writer


def _content(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_what_was_written_in_two_goes_is_what_one_go_writes(tmp_path):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  _write(whole, [0, 1, 2], finish=True)
  _write(parts, [0])
  with pytest.raises(ValueError, match=r"manifest\.json"):
    NpyShards(str(parts), "test")
  assert not ResumableShards(parts, MANIFEST, private=True).complete
  _write(parts, [1, 2], finish=True)
  assert _content(whole) == _content(parts)
  source = NpyShards(str(parts), "train")
  expected = [_arrays(shard) for shard in range(3)]
  rows = source.gather(np.arange(10))
  np.testing.assert_array_equal(rows["inputs"], np.concatenate([x["inputs"] for x in expected]))
  np.testing.assert_array_equal(rows["label"], np.concatenate([x["labels"] for x in expected]))
  assert source.column("person")[5] == "p1"


def test_a_shard_without_its_labels_is_not_done(tmp_path):
  _write(tmp_path / "a", [0])
  (tmp_path / "a" / "train_inputs_00001.npy").write_bytes(b"half")
  (tmp_path / "a" / ".train_labels_00001.npy.tmp").write_bytes(b"ha")
  writer = _write(tmp_path / "a", [1, 2], finish=True)
  assert writer.complete
  assert len(NpyShards(str(tmp_path / "a"), "train")) == 10
  assert not list((tmp_path / "a").glob(".*.tmp"))


def test_a_folder_that_lacks_a_shard_is_not_completed(tmp_path):
  with pytest.raises(ValueError, match="lacks shards of 'train'"):
    _write(tmp_path / "a", [0, 2], finish=True)
  assert not (tmp_path / "a" / "manifest.json").exists()
  _write(tmp_path / "a", [1], finish=True)


def test_other_features_are_refused_by_name_and_nothing_changes(tmp_path):
  _write(tmp_path / "a", [0])
  before = _content(tmp_path / "a")
  other = {**MANIFEST, "origin": {"weights_sha256": "def"}, "input_dtype": "float32"}
  with pytest.raises(ValueError, match=r"origin\.weights_sha256 is 'abc' there and 'def' here"):
    _write(tmp_path / "a", [1], manifest=other)
  with pytest.raises(ValueError, match="input_dtype is 'float16'"):
    _write(tmp_path / "a", [1], manifest=other)
  assert _content(tmp_path / "a") == before
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "thesis.txt").write_text("my only copy")
  with pytest.raises(ValueError, match=r"is not empty \(thesis\.txt\)"):
    _write(tmp_path / "b", [0])
  assert (tmp_path / "b" / "thesis.txt").read_text() == "my only copy"


def test_what_depends_on_private_records_is_not_told(tmp_path):
  """P15: neither their number nor a hash of them."""
  origin = {"source_sha256": {"train": "aaa"}}
  _write(tmp_path / "a", [0], manifest={**MANIFEST, "origin": origin})
  other = {**MANIFEST, "origin": {"source_sha256": {"train": "bbb"}}, "splits": {"train": [4, 9]}}
  with pytest.raises(ValueError, match="the records differ; the records, or how many") as error:
    _write(tmp_path / "a", [1], manifest=other)
  assert not [secret for secret in ("aaa", "bbb", "[4", "9]") if secret in str(error.value)]
  with pytest.raises(ValueError, match=r"is 'aaa' there.*splits.train is \[4, 4, 2\]"):
    _write(tmp_path / "b", [0], manifest={**MANIFEST, "origin": origin}, private=False)
    _write(tmp_path / "b", [1], manifest=other, private=False)


def test_two_processes_do_not_write_at_once(tmp_path):
  writer = ResumableShards(tmp_path / "a", MANIFEST, private=True)
  with writer.open():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
      error = pool.apply(_error_of_opening, (tmp_path / "a",))
  assert "another process is writing" in error


def _error_of_opening(folder):
  try:
    _write(folder, [])
  except ValueError as error:
    return str(error)
  return ""


@pytest.mark.parametrize("private", [True, False])
def test_private_features_are_readable_by_the_owner_alone(tmp_path, private):
  previous = os.umask(0o022)
  try:
    _write(tmp_path / "a", [0, 1, 2], private=private, finish=True)
  finally:
    os.umask(previous)
  modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").glob("[!.]*")}
  folder = stat.S_IMODE((tmp_path / "a").stat().st_mode)
  assert (folder, modes) == ((0o700, {0o600}) if private else (0o755, {0o644}))
  assert json.loads((tmp_path / "a" / "manifest.json").read_text()) == MANIFEST


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="cannot write to"):
    _write(tmp_path / "file" / "a", [0])
