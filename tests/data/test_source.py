"""Opening sources, and the two that hold arrays: the scans and .npz files."""

import pathlib

import numpy as np
import pytest

from dp_jax.data import ArraySource, SourceInfo, open_source
from dp_jax.data.sources.source import telling


def test_digits_split_is_a_partition_and_follows_the_seed():
  train, test = open_source("digits", "train"), open_source("digits", "test")
  assert (len(train), len(test)) == (1437, 360)
  both = [source.gather(np.arange(len(source)))["inputs"] for source in (train, test)]
  assert both[0].shape == (1437, 8, 8, 1) and both[0].dtype == np.uint8
  pixels = np.concatenate(both)
  assert pixels.min() == 0 and pixels.max() == 16
  # The two sides hold the same scans whatever the seed, and another seed swaps some.
  other = np.concatenate(
    [
      (source := open_source("digits", split, seed=1)).gather(np.arange(len(source)))["inputs"]
      for split in ("train", "test")
    ]
  )
  assert sorted(map(bytes, pixels)) == sorted(map(bytes, other))
  assert train.fingerprint() == open_source("digits", "train").fingerprint()
  assert train.fingerprint() != open_source("digits", "train", seed=1).fingerprint()


def test_unknown_names_and_splits():
  with pytest.raises(ValueError, match=r"unknown data source 'mnist'; use one of digits"):
    open_source("mnist", "train")
  for name in ("digits", "rendered_digits"):
    with pytest.raises(ValueError, match="splits train and test, not 'validation'"):
      open_source(name, "validation")
  with pytest.raises(ValueError, match="num_records must be at least 1, not 0"):
    open_source("digits", "train", num_records=0)


def test_num_records_keeps_the_first():
  whole, head = open_source("digits", "train"), open_source("digits", "train", num_records=7)
  assert len(head) == head.info.num_records == 7
  np.testing.assert_array_equal(head[6]["inputs"], whole[6]["inputs"])
  with pytest.raises(IndexError):
    head[7]
  with pytest.raises(IndexError):
    head.gather(np.array([0, 7]))
  assert head.fingerprint() != whole.fingerprint()


def _write(path: pathlib.Path, **arrays: np.ndarray) -> str:
  np.savez(path, **arrays)
  return str(path)


def test_npz_one_file(tmp_path):
  images = np.arange(5 * 28 * 28, dtype=np.uint8).reshape(5, 28, 28)
  labels = np.arange(5, dtype=np.uint8)
  for image_key, label_key in (("train_image", "train_label"), ("x_train", "y_train")):
    path = _write(tmp_path / "a.npz", **{image_key: images, label_key: labels})
    source = open_source("npz", "train", path=path)
    assert source.info.input_shape == (28, 28, 1)
    assert source.info.value_range == (0.0, 255.0)
    assert source.info.num_classes is None  # reading it off the labels would depend on them
    np.testing.assert_array_equal(source[3]["inputs"][..., 0], images[3])
    assert source[3]["label"] == 3
  told = r"no array 'test_image' .*it has x_train, y_train"
  with pytest.raises(ValueError, match=told), telling(True):
    open_source("npz", "test", path=path)


def test_npz_folder_and_floats(tmp_path):
  images = np.linspace(0, 1, 4 * 3 * 3 * 2).reshape(4, 3, 3, 2)
  images[1, 0, 0] = np.nan, 1e300
  _write(tmp_path / "test.npz", image=images, label=np.array([[0], [1], [0], [1]]))
  source = open_source("npz", "test", path=str(tmp_path))
  batch = source.gather(np.array([1, 3]))
  assert batch["inputs"].dtype == np.float32 and batch["label"].dtype == np.int64
  assert np.isnan(batch["inputs"][0, 0, 0, 0]) and np.isinf(batch["inputs"][0, 0, 0, 1])
  assert source.info.value_range == (0.0, 1.0)
  with pytest.raises(ValueError, match=r"no such file: .*train\.npz"):
    open_source("npz", "train", path=str(tmp_path))


def test_npz_refuses_what_is_malformed(tmp_path):
  images, labels = np.zeros((3, 4, 4), np.uint8), np.zeros(3, np.int64)
  cases = [
    ({"train_image": images, "train_label": labels[:2]}, "3 integers, one per image"),
    ({"train_image": images, "train_label": labels.astype(float)}, "integers, one per image"),
    ({"train_image": images[0], "train_label": labels}, r"\[N, H, W\] or \[N, H, W, C\]"),
    ({"train_image": images.astype(str), "train_label": labels}, "must be numbers"),
    ({"train_image": images[:0], "train_label": labels[:0]}, "empty"),
    ({"train_image": images.astype(object), "train_label": labels}, "cannot read the array"),
    ({"train_image": images}, "no array 'train_label'"),
  ]
  for arrays, message in cases:
    path = _write(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message), telling(True):
      open_source("npz", "train", path=path)
  (tmp_path / "text.npz").write_text("not an archive")
  with pytest.raises(ValueError, match=r"not an \.npz archive"):
    open_source("npz", "train", path=str(tmp_path / "text.npz"))
  with pytest.raises(ValueError, match=r"set data\.path"):
    open_source("npz", "train")


def test_array_source_refuses_shapes_that_contradict_its_info():
  info = SourceInfo("x", 2, (4, 4, 1), None, (0.0, 1.0), input_dtype="float32")
  with pytest.raises(ValueError, match="do not fit the declared"):
    ArraySource(info, np.zeros((2, 4, 4), np.float32), np.zeros(2, np.int64))
