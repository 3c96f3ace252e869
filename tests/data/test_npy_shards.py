"""Memory-mapped shards: what is written comes back, whatever the cut."""

import json

import ml_dtypes
import numpy as np
import pytest
from support import one_label

from dp_jax.data import UnitLoader, open_source
from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.data.sources.source import telling

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(23, 5)).astype(np.float16)
LABELS = RNG.integers(0, 3, 23)
PATIENTS = np.array([f"patient {i % 7:0{1 + i % 3}d}" for i in range(23)])


def _write(folder, *, records_per_shard=10, chunk=4, **options):
  writer = ShardWriter(folder, num_classes=3, records_per_shard=records_per_shard, **options)
  for start in range(0, 23, chunk):
    part = slice(start, start + chunk)
    writer.append("train", FEATURES[part], LABELS[part], {"patient": PATIENTS[part]})
  writer.append("test", FEATURES[:6], LABELS[:6], {"patient": PATIENTS[:6]})
  writer.close()
  return str(folder)


@pytest.mark.parametrize(("records_per_shard", "chunk"), [(10, 4), (3, 23), (100, 1)])
def test_round_trip(tmp_path, records_per_shard, chunk):
  path = _write(tmp_path / "a", records_per_shard=records_per_shard, chunk=chunk)
  source = open_source("npy", "train", path=path)
  assert source.info.input_dtype == "float16" and source.info.input_shape == (5,)
  assert source.info.num_classes == 3 and source.info.value_range == (-1.0, 1.0)
  indices = RNG.permutation(23)
  batch = source.gather(indices)
  assert batch["inputs"].dtype == np.float16
  np.testing.assert_array_equal(batch["inputs"], FEATURES[indices])
  np.testing.assert_array_equal(batch["label"], LABELS[indices])
  np.testing.assert_array_equal(source[11]["inputs"], FEATURES[11])
  assert source.gather(np.zeros(0, np.int64))["inputs"].shape == (0, 5)
  np.testing.assert_array_equal(source.column("patient"), PATIENTS)
  assert len(open_source("npy", "test", path=path)) == 6
  with pytest.raises(ValueError, match="no column 'age'; its columns: patient"), telling(True):
    source.column("age")
  with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
    open_source("npy", "validation", path=path)


def test_units_keep_float16(tmp_path):
  source = open_source("npy", "train", path=_write(tmp_path / "a"))
  units, _ = UnitLoader(source, one_label((5,), 3, (-1.0, 1.0))).load(np.arange(3), 4)
  assert units["inputs"].dtype == np.float16 and units["inputs"].shape == (4, 1, 5)


BFLOAT16 = RNG.standard_normal((23, 5), np.float32).astype(ml_dtypes.bfloat16)


def _write_bfloat16(folder, **options):
  writer = ShardWriter(folder, num_classes=3, records_per_shard=10, **options)
  writer.append("train", BFLOAT16, LABELS)
  writer.close()
  return str(folder)


def test_bfloat16_comes_back_and_its_files_need_numpy_alone(tmp_path):
  path = _write_bfloat16(tmp_path / "a")
  stored = np.load(tmp_path / "a" / "train_inputs_00001.npy", mmap_mode="r")
  assert stored.dtype == np.uint16 and (stored == BFLOAT16[10:20].view(np.uint16)).all()
  source = open_source("npy", "train", path=path)
  assert source.info.input_dtype == "bfloat16" and source.info.dtype == ml_dtypes.bfloat16
  assert isinstance(source._inputs[0], np.memmap)
  indices = RNG.permutation(23)
  rows = source.gather(indices)["inputs"]
  assert rows.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(rows.view(np.uint16), BFLOAT16[indices].view(np.uint16))
  units, _ = UnitLoader(source, one_label((5,), 3, (-1.0, 1.0))).load(indices, 23)
  assert units["inputs"].dtype == ml_dtypes.bfloat16
  # With a label that is no class, records are taken one by one.
  labels = tmp_path / "a" / "train_labels_00000.npy"
  np.save(labels, np.where(np.arange(10) == 4, -1, np.load(labels)))
  source = open_source("npy", "train", path=path)
  units, _ = UnitLoader(source, one_label((5,), 3, (-1.0, 1.0))).load(np.arange(23), 23)
  expected = np.where(np.arange(23)[:, None] == 4, 0, BFLOAT16.astype(np.float32))
  np.testing.assert_array_equal(units["inputs"][:, 0].astype(np.float32), expected)
  assert list(np.flatnonzero(~units["record_mask"])) == [4]


def test_bits_of_bfloat16_are_not_taken_for_numbers(tmp_path):
  """They are what the manifest says, and nothing without one."""
  path = _write_bfloat16(tmp_path / "a")
  manifest = tmp_path / "a" / "manifest.json"
  content = json.loads(manifest.read_text())
  manifest.write_text(json.dumps({**content, "input_dtype": "float16"}))
  with pytest.raises(ValueError, match=r"inputs must be .* not uint16"):
    open_source("npy", "train", path=path)
  manifest.unlink()
  with pytest.raises(ValueError, match=r"inputs must be .* not uint16"):
    open_source("npy", "train", path=path)
  other = _write(tmp_path / "b")
  manifest = tmp_path / "b" / "manifest.json"
  content = json.loads(manifest.read_text())
  manifest.write_text(json.dumps({**content, "input_dtype": "bfloat16"}))
  with pytest.raises(ValueError, match=r"inputs are float16, but manifest\.json says bfloat16"):
    open_source("npy", "train", path=other)


@pytest.mark.parametrize("dtype", [np.int8, np.float32, ml_dtypes.bfloat16])
def test_several_labels_a_record(tmp_path, dtype):
  labels = RNG.integers(-1, 2, (23, 4)).astype(dtype)
  writer = ShardWriter(tmp_path / "a", records_per_shard=10)
  if dtype == ml_dtypes.bfloat16:
    with pytest.raises(ValueError, match=r"numbers \[n, num_classes\], not bfloat16"):
      writer.append("train", FEATURES, labels)
    return
  writer.append("train", FEATURES, labels)
  writer.close()
  source = open_source("npy", "train", path=str(tmp_path / "a"))
  assert source.info.label_shape and source.info.num_classes == 4
  rows = source.gather(np.arange(23))
  assert rows["label"].dtype == np.float32
  np.testing.assert_array_equal(rows["label"], labels)
  units, _ = UnitLoader(source, one_label((5,), 4, (-1.0, 1.0), True)).load(np.arange(3), 4)
  np.testing.assert_array_equal(units["label"][:3, 0], labels[:3])
  manifest = tmp_path / "a" / "manifest.json"
  manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "num_classes": 3}))
  with pytest.raises(ValueError, match="4 labels a record, not 3"):
    open_source("npy", "train", path=str(tmp_path / "a"))
  np.save(tmp_path / "a" / "train_labels_00002.npy", labels[20:, :2])
  with pytest.raises(ValueError, match=r"labels must be integers \[n\], or numbers"):
    open_source("npy", "train", path=str(tmp_path / "a"))


def test_without_a_manifest(tmp_path):
  images = RNG.integers(0, 256, (7, 4, 4, 3), np.uint8)
  for shard, part in enumerate((slice(0, 4), slice(4, 7))):
    np.save(tmp_path / f"train_inputs_{shard:05d}.npy", images[part])
    np.save(tmp_path / f"train_labels_{shard:05d}.npy", np.arange(7)[part])
  source = open_source("npy", "train", path=str(tmp_path))
  assert source.info.num_classes is None and source.info.value_range == (0.0, 255.0)
  np.testing.assert_array_equal(source.gather(np.array([6, 0]))["inputs"], images[[6, 0]])
  np.save(tmp_path / "train_inputs_00001.npy", images[:2])
  told = r"00001.*\(2, 4, 4, 3\), but 3 records are expected"
  with pytest.raises(ValueError, match=told), telling(True):
    open_source("npy", "train", path=str(tmp_path))


def test_the_fingerprint_follows_the_records(tmp_path):
  first = open_source("npy", "train", path=_write(tmp_path / "a")).fingerprint()
  assert first == open_source("npy", "train", path=_write(tmp_path / "b")).fingerprint()
  for name in ("inputs", "labels", "patient"):
    path = _write(tmp_path / name)
    file = tmp_path / name / f"train_{name}_00001.npy"
    array = np.load(file)
    array[3] = array[4]
    np.save(file, array)
    assert open_source("npy", "train", path=path).fingerprint() != first, name


def test_what_does_not_fit_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"set data\.path"):
    open_source("npy", "train")
  with pytest.raises(ValueError, match="no such folder"):
    open_source("npy", "train", path=str(tmp_path / "missing"))
  with pytest.raises(ValueError, match=r"neither manifest\.json nor train_labels_00000\.npy"):
    open_source("npy", "train", path=str(tmp_path))
  path = _write(tmp_path / "a")
  with pytest.raises(ValueError, match="is not empty"):
    ShardWriter(path)
  (tmp_path / "a" / "train_labels_00000.npy").write_bytes(b"no array")
  with pytest.raises(ValueError, match=r"cannot read .*train_labels_00000\.npy"):
    open_source("npy", "train", path=path)
  (tmp_path / "a" / "manifest.json").write_text(json.dumps({"splits": []}))
  with pytest.raises(ValueError, match=r"no manifest of \.npy shards"):
    open_source("npy", "train", path=path)
  (tmp_path / "a" / "manifest.json").write_text("{")
  with pytest.raises(ValueError, match=r"no manifest of \.npy shards"):
    open_source("npy", "train", path=path)


def test_the_writer_refuses_what_does_not_fit(tmp_path):
  writer = ShardWriter(tmp_path / "a")
  with pytest.raises(ValueError, match="no records were added"):
    writer.close()
  cases = [
    ((FEATURES, LABELS[:4]), "different lengths"),
    ((FEATURES.astype(np.float64), LABELS), "float16, bfloat16, float32, not float64"),
    ((FEATURES, LABELS.astype(float)), "labels must be integers"),
    ((FEATURES, LABELS, {"x": FEATURES}), "column 'x' must be numbers or strings"),
  ]
  for arguments, message in cases:
    with pytest.raises(ValueError, match=message):
      writer.append("train", *arguments)
  writer.append("train", FEATURES, LABELS)
  with pytest.raises(ValueError, match="records of shape and dtype"):
    writer.append("train", FEATURES[:, :2], LABELS)
  writer.append("test", FEATURES, LABELS)
  with pytest.raises(ValueError, match="'train' was written before"):
    writer.append("train", FEATURES, LABELS)
