"""A tfds data set that is built here, written as array_record and read without TensorFlow."""

import io
import shutil
import sys

import numpy as np
import pytest
from PIL import Image
from support import one_label

from dp_jax.data import UnitLoader, open_source
from dp_jax.data.sources import tfds_source

NUM_RECORDS = 12


def _pixels(index: int) -> np.ndarray:
  return np.random.default_rng(index).integers(0, 256, (6, 5), np.uint8)


def _encoded(index: int) -> bytes:
  """A PNG, or for the fourth record a truncated one."""
  buffer = io.BytesIO()
  Image.fromarray(_pixels(index)).save(buffer, "PNG")
  return buffer.getvalue()[:40] if index == 3 else buffer.getvalue()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> str:
  tfds = pytest.importorskip("tensorflow_datasets")

  class TinyScans(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = None  # a test module is no package that could hold metadata

    def _info(self):
      features = {
        # Encoding pixels needs TensorFlow; encoded bytes pass through.
        "image": tfds.features.Image(shape=(6, 5, 1)),
        "pixels": tfds.features.Tensor(shape=(6, 5, 1), dtype=np.float32),
        "label": tfds.features.ClassLabel(names=["left", "right", "both"]),
      }
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      for index in range(NUM_RECORDS):
        yield (
          index,
          {
            "image": _encoded(index),
            "pixels": _pixels(index)[..., None].astype(np.float32),
            "label": index % 3,
          },
        )

  folder = str(tmp_path_factory.mktemp("tfds"))
  TinyScans(data_dir=folder, file_format="array_record").download_and_prepare()
  return folder


def test_round_trip_without_tensorflow(data_dir):
  source = open_source("tfds:tiny_scans", "train", path=data_dir)
  assert source.info.input_shape == (6, 5, 1) and source.info.input_dtype == "uint8"
  assert source.info.class_names == ("left", "right", "both") and source.info.num_classes == 3
  loader = UnitLoader(source, one_label((6, 5, 1), 3, (0.0, 255.0)))
  units, _ = loader.load(np.arange(NUM_RECORDS), NUM_RECORDS)
  # tfds shuffles as it writes, so match records by their pixels.
  written = {_pixels(index).tobytes(): index % 3 for index in range(NUM_RECORDS) if index != 3}
  good = units["record_mask"][:, 0]
  assert good.sum() == NUM_RECORDS - 1
  read = {
    image.tobytes(): label
    for image, label in zip(units["inputs"][good, 0], units["label"][good, 0], strict=True)
  }
  assert read == written
  assert list(loader.bad_records) == [int(np.flatnonzero(~good)[0])]
  assert "cannot be decoded" in next(iter(loader.bad_records.values()))
  assert "tensorflow" not in sys.modules


def test_tensor_features_and_slices(data_dir):
  source = tfds_source.TfdsSource("tiny_scans", "train[:4]", data_dir=data_dir, image_key="pixels")
  assert len(source) == 4 and source.info.input_dtype == "float32"
  written = {_pixels(index).astype(np.float32).tobytes() for index in range(NUM_RECORDS)}
  loader = UnitLoader(source, one_label((6, 5, 1), 3, (0.0, 255.0)), strict=True)
  units, _ = loader.load(np.array([0, 3]), 2)
  assert units["inputs"].dtype == np.float32
  assert {image.tobytes() for image in units["inputs"]} <= written
  whole = tfds_source.TfdsSource("tiny_scans", "train", data_dir=data_dir)
  assert source.fingerprint() != whole.fingerprint()


def test_what_is_not_there(data_dir):
  with pytest.raises(ValueError, match=r"cannot open split 'train' of tfds:no_such_set in "):
    open_source("tfds:no_such_set", "train", path=data_dir)
  with pytest.raises(ValueError, match=r"cannot open split 'validation' of tfds:tiny_scans"):
    open_source("tfds:tiny_scans", "validation", path=data_dir)
  with pytest.raises(ValueError, match=r"no feature 'scan'; it has image, label, pixels"):
    tfds_source.TfdsSource("tiny_scans", "train", data_dir=data_dir, image_key="scan")
  with pytest.raises(ValueError, match=r"'label' must be \[H, W, C\]"):
    tfds_source.TfdsSource("tiny_scans", "train", data_dir=data_dir, image_key="label")


def test_message_when_tfds_is_not_installed(monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
  with pytest.raises(ValueError, match=r"pip install 'dp_jax\[tfds\]'"):
    open_source("tfds:mnist", "train")


@pytest.mark.parametrize("split", ["train[:50%]", "train[10%:]", "train[:5]", "train[-3:]",
                                   "train[:2]+train[4:]"])  # fmt: skip
def test_a_slice_is_a_cut_that_depends_on_all_records(data_dir, split):
  """P19: it counts from an end, so one record less lets another one in."""
  assert open_source("tfds:tiny_scans", split, path=data_dir).info.cut == f"the split {split!r}"
  assert open_source("tfds:tiny_scans", "train", path=data_dir).info.cut == ""


def test_the_fingerprint_follows_the_content_of_shards(data_dir, tmp_path):
  shutil.copytree(data_dir, tmp_path / "copy")
  first = open_source("tfds:tiny_scans", "train", path=data_dir).fingerprint()
  source = open_source("tfds:tiny_scans", "train", path=str(tmp_path / "copy"))
  assert source.fingerprint() == first  # whatever its times
  (shard,) = (tmp_path / "copy").rglob("*array_record*")
  content = bytearray(shard.read_bytes())
  content[len(content) // 2] ^= 1
  shard.write_bytes(content)
  assert source.fingerprint() != first
