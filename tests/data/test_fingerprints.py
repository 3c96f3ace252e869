"""Fingerprints follow the content of files, by all of it or by a sample, and open nothing odd."""

import os

import numpy as np
import pytest
from PIL import Image

from dp_jax.data import open_source
from dp_jax.data.sources.csv_source import Csv
from dp_jax.files import ordinary
from dp_jax.files.ordinary import sample_digest, sizes_of

SPEC = Csv(label_columns=("ill",), class_names=("no", "yes"), image_column="file")


def _image(path, level):
  """Every level gives a file of the same size."""
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(np.full((5, 5), level, np.uint8)).save(path, "BMP")


def _csv(folder, level):
  for name in "abc":
    _image(folder / f"{name}.png", level if name == "b" else 1)
  (folder / "train.csv").write_text("file,ill\na.png,no\nb.png,yes\nc.png,no\ngone.png,no\n,no\n")
  return open_source("csv", "train", SPEC, path=str(folder), input_shape=(4, 4, 1))


def _folder(folder, level):
  for name in "abc":
    _image(folder / "train" / name / "1.png", level if name == "b" else 1)
  return open_source("folder", "train", path=str(folder), input_shape=(4, 4, 1))


@pytest.mark.parametrize("make", [_csv, _folder])
def test_another_image_of_the_same_size_is_another_fingerprint(tmp_path, make):
  """P10: else old noise goes over new gradients when a run is resumed."""
  first = make(tmp_path / "data", 2)
  before = first.fingerprint()
  assert (
    make(tmp_path / "data", 2).fingerprint() == before == make(tmp_path / "copy", 2).fingerprint()
  )
  assert make(tmp_path / "data", 3).fingerprint() != before
  file = next(tmp_path.glob("data/**/b*/1.png"), tmp_path / "data" / "b.png")
  file.unlink()
  assert (again := _again(make, tmp_path / "data")) != before
  os.mkfifo(file)  # opening it would wait for ever
  assert _again(make, tmp_path / "data") in (again, before) or make is _folder


def _again(make, folder):
  if make is _csv:
    source = open_source("csv", "train", SPEC, path=str(folder), input_shape=(4, 4, 1))
  else:
    source = open_source("folder", "train", path=str(folder), input_shape=(4, 4, 1))
  return source.fingerprint()


def test_the_root_of_images_matters(tmp_path):
  for name, level in (("one", 1), ("two", 2)):
    _csv(tmp_path / name, level)
  text = (tmp_path / "one" / "train.csv").read_text()
  (tmp_path / "table").mkdir()
  (tmp_path / "table" / "train.csv").write_text(text)
  table = str(tmp_path / "table")
  found = []
  for name in ("one", "two"):
    spec = Csv(
      label_columns=("ill",),
      class_names=("no", "yes"),
      image_column="file",
      image_root=str(tmp_path / name),
    )
    source = open_source("csv", "train", spec, path=table, input_shape=(4, 4, 1))
    found.append(source.fingerprint())
  assert len(set(found)) == 2


def test_of_large_files_ends_and_places_between_are_sampled(tmp_path, monkeypatch):
  monkeypatch.setattr(ordinary, "WHOLE_BYTES", 1000)
  paths = [tmp_path / str(i) for i in range(200)]
  for path in paths:
    path.write_bytes(bytes(20_000))
  sizes = sizes_of(paths)
  before = sample_digest(paths, sizes)
  for at, place in ((0, 0), (0, 19_999), (199, 0), (199, 19_999), (199, 1020)):
    content = bytearray(20_000)
    content[place] = 1
    paths[at].write_bytes(content)
    assert sample_digest(paths, sizes) != before, (at, place)
    paths[at].write_bytes(bytes(20_000))
  assert sample_digest(paths, sizes) == before
  read = []
  whole = ordinary.open_regular
  monkeypatch.setattr(ordinary, "open_regular", lambda path: read.append(path) or whole(path))
  sample_digest(paths, sizes)
  assert len(read) == 64 and {paths[0], paths[199]} <= set(read)


def test_what_is_no_ordinary_file_has_no_size_and_is_not_opened(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "folder").mkdir()
  paths = [tmp_path / "pipe", tmp_path / "folder", tmp_path / "gone", "a\0b"]
  assert sizes_of(paths) == [-1] * 4
  for path in paths:
    with pytest.raises((OSError, ValueError)):
      ordinary.open_regular(path)
  assert sample_digest(paths, [5] * 4) != sample_digest(paths, [-1] * 4)


def test_large_arrays_of_shards_are_sampled_and_small_ones_read(tmp_path):
  inputs = np.zeros((5000, 2), np.float16)
  np.save(tmp_path / "train_labels_00000.npy", np.zeros(5000, np.int64))

  def digest():
    np.save(tmp_path / "train_inputs_00000.npy", inputs)
    return open_source("npy", "train", path=str(tmp_path)).fingerprint()

  before = digest()
  inputs[4321, 1] = 1  # not one of 1,024 rows
  assert digest() != before
