"""Class folders: order, classes, unreadable files, and the real JPEGs of CIFAR-10."""

import pathlib
import tarfile

import numpy as np
import pytest
from PIL import Image
from support import one_label

from dp_jax.data import RecordError, UnitLoader, open_source
from dp_jax.data.sources.source import telling

ARCHIVE = pathlib.Path(__file__).parents[3] / "shared" / "data" / "cifar10_jpeg.tar.xz"


def _write(root: pathlib.Path, split: str, files: dict[str, int]) -> None:
  """Plain images, one grey level each; the name says the class and the file."""
  for name, level in files.items():
    file = root / split / name
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), level, np.uint8)).save(file, "PNG")


def _open(root: pathlib.Path, split: str = "train", **options):
  return open_source("folder", split, path=str(root), input_shape=(4, 4, 3), **options)


def test_records_are_in_the_order_of_class_and_name(tmp_path):
  _write(tmp_path, "train", {"dog/b.png": 3, "cat/z.PNG": 2, "dog/a.jpeg": 1, "cat/.x.png": 9})
  (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
  source = _open(tmp_path)
  assert source.info.class_names == ("cat", "dog") and source.info.num_classes == 2
  assert source.info.input_shape == (4, 4, 3) and len(source) == 3
  records = [*source.gather(np.array([2, 0, 1]))]
  assert [record["label"] for record in records] == [1, 0, 1]
  assert [record["inputs"][0, 0, 0] for record in records] == [3, 2, 1]
  one = source[1]["inputs"]
  assert one.shape == (4, 4, 3) and one.dtype == np.uint8


def test_classes_can_be_declared_and_are_shared_by_the_splits(tmp_path):
  _write(tmp_path, "train", {"b/1.png": 1, "c/1.png": 2})
  source = _open(tmp_path, class_names=("c", "a", "b"))
  assert [record["label"] for record in source.gather(np.arange(2))] == [0, 2]
  told = "has the folder 'c', which is not among the classes"
  with pytest.raises(ValueError, match=told), telling(True):
    _open(tmp_path, class_names=("a", "b"))
  with pytest.raises(ValueError, match="3 names, of which 2 differ"):
    _open(tmp_path, class_names=("b", "c", "b"))


def test_the_fingerprint_follows_names_sizes_and_decoding(tmp_path):
  _write(tmp_path, "train", {"a/1.png": 1, "b/1.png": 2})
  _write(tmp_path / "copy", "train", {"a/1.png": 1, "b/1.png": 2})
  whole = _open(tmp_path).fingerprint()
  assert whole == _open(tmp_path / "copy").fingerprint()
  assert whole != _open(tmp_path, resize="stretch").fingerprint()
  assert whole != _open(tmp_path, class_names=("a", "b", "c")).fingerprint()
  (tmp_path / "train" / "a" / "1.png").write_bytes(b"shorter")
  assert whole != _open(tmp_path).fingerprint()
  (tmp_path / "copy" / "train" / "a" / "1.png").rename(tmp_path / "copy" / "train" / "a" / "2.png")
  assert whole != _open(tmp_path / "copy").fingerprint()


def test_unreadable_files_have_zero_weight_unless_strict(tmp_path):
  _write(tmp_path, "train", {"a/1.png": 1, "a/2.png": 2, "b/1.png": 3, "b/2.png": 4})
  (tmp_path / "train" / "a" / "2.png").write_bytes(b"no image")
  source = _open(tmp_path)
  (tmp_path / "train" / "b" / "1.png").unlink()
  (tmp_path / "train" / "b" / "link.png").symlink_to("nowhere")
  assert len(_open(tmp_path)) == 4  # a link to nothing is a record that cannot be read
  records = [*source.gather(np.arange(4))]
  assert [isinstance(record, RecordError) for record in records] == [False, True, True, False]
  spec = one_label((4, 4, 3), 2, (0.0, 255.0))
  loader = UnitLoader(source, spec)
  units, mask = loader.load(np.arange(4), 5)
  assert units["record_mask"][:, 0].tolist() == [True, False, False, True, False]
  assert mask.tolist() == [True] * 4 + [False]
  assert not units["inputs"][1:3].any() and set(loader.bad_records) == {1, 2}
  with pytest.raises(ValueError, match=r"record 1 of folder/train: cannot be decoded"):
    UnitLoader(source, spec, strict=True).load(np.arange(4), 4)


def test_what_is_no_data_set_is_refused(tmp_path):
  (tmp_path / "train" / "empty").mkdir(parents=True)
  with pytest.raises(ValueError, match=r"has no \.jpg, \.jpeg, \.png files in class folders"):
    _open(tmp_path)
  with pytest.raises(ValueError, match=r"no such folder: .*test"):
    _open(tmp_path, "test")
  with pytest.raises(ValueError, match=r"set data\.path"):
    open_source("folder", "train", input_shape=(4, 4, 3))
  with pytest.raises(ValueError, match=r"declare data\.input_shape"):
    open_source("folder", "train", path=str(tmp_path))


@pytest.mark.skipif(not ARCHIVE.exists(), reason="needs ../shared/data/cifar10_jpeg.tar.xz")
def test_real_jpegs(tmp_path):
  count = 0
  with tarfile.open(ARCHIVE) as archive:
    for member in archive:
      if member.isfile() and member.name.endswith(".jpg"):
        archive.extract(member, tmp_path, filter="data")
        count += 1
      if count == 200:
        break
  (root,) = {path.parents[2] for path in tmp_path.rglob("*.jpg")}
  (split,) = {path.parents[1].name for path in tmp_path.rglob("*.jpg")}
  source = open_source("folder", split, path=str(root), input_shape=(32, 32, 3))
  assert len(source) == 200
  images = np.stack([record["inputs"] for record in source.gather(np.arange(200))])
  assert images.shape == (200, 32, 32, 3) and images.std() > 30
  larger = open_source("folder", split, path=str(root), input_shape=(64, 48, 1))
  assert larger[7]["inputs"].shape == (64, 48, 1)


def test_folders_that_systems_leave_are_no_classes_unless_declared(tmp_path):
  junk = ("__MACOSX", "lost+found", "@eaDir", ".ipynb_checkpoints", "__pycache__", "#recycle")
  _write(tmp_path, "train", {"a/1.png": 1, "b/1.png": 2, **{f"{name}/1.png": 3 for name in junk}})
  (tmp_path / "train" / "Thumbs.db").write_bytes(b"x")
  (tmp_path / "train" / "a" / "Thumbs.db").write_bytes(b"x")
  for names in (None, ("a", "b")):
    source = _open(tmp_path, class_names=names)
    assert source.info.class_names == ("a", "b") and len(source) == 2
  declared = _open(tmp_path, class_names=("a", "b", "__MACOSX", ".ipynb_checkpoints"))
  assert [record["label"] for record in declared.gather(np.arange(len(declared)))] == [0, 1, 2, 3]
