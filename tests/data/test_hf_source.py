"""Hugging Face data sets on disk: images, vectors, missing values and further columns."""

import io
import sys

import datasets
import numpy as np
import pytest
from PIL import Image
from support import one_label

from dp_jax.data import RecordError, UnitLoader, open_source
from dp_jax.data.sources.custom import as_source
from dp_jax.data.sources.options import Context
from dp_jax.data.sources.source import telling
from dp_jax.data.unit_index import UnitIndex

COUNT = 7
LEVELS = np.arange(COUNT) * 30
VECTORS = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)


def _png(level: int) -> bytes:
  out = io.BytesIO()
  Image.fromarray(np.full((6, 5, 3), level, np.uint8)).save(out, "PNG")
  return out.getvalue()


def _columns() -> tuple[dict, datasets.Features]:
  columns = {
    "scan": [{"bytes": _png(level), "path": None} for level in LEVELS],
    "finding": [i % 2 for i in range(COUNT)],
    "patient": [f"p{i // 2}" for i in range(COUNT)],
    "age": [40.5, None, 3.0, 4.0, 5.0, 6.0, 7.0],
    "vector": VECTORS.tolist(),
    "array": np.arange(COUNT * 8).reshape(COUNT, 2, 2, 2).tolist(),
  }
  features = datasets.Features({
    "scan": datasets.Image(), "finding": datasets.ClassLabel(names=["absent", "present"]),
    "patient": datasets.Value("string"), "age": datasets.Value("float32"),
    "vector": datasets.List(datasets.Value("float32"), length=4),
    "array": datasets.Array3D((2, 2, 2), "uint8"),
  })  # fmt: skip
  return columns, features


def _save(path, **changes) -> str:
  columns, features = _columns()
  columns |= changes
  columns, features = (
    {name: value for name, value in which.items() if columns[name] is not None}
    for which in (columns, features)
  )
  whole = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
  split = datasets.DatasetDict({"train": whole, "test": whole.select([1])})
  split.save_to_disk(str(path))
  return str(path)


@pytest.fixture(autouse=True)
def _quiet():
  datasets.disable_progress_bars()


def _open(path, split="train", **options):
  return open_source("hf", split, path=path, **options)


def test_images(tmp_path):
  source = _open(_save(tmp_path), input_shape=(4, 4, 3))
  assert len(source) == COUNT and len(_open(str(tmp_path), "test", input_shape=(4, 4, 3))) == 1
  assert source.info.class_names == ("absent", "present") and source.info.num_classes == 2
  records = [*source.gather(np.array([5, 0, 5]))]
  assert [record["inputs"][0, 0, 0] for record in records] == [150, 0, 150]
  assert [record["label"] for record in records] == [1, 0, 1]
  assert source[2]["inputs"].shape == (4, 4, 3) and source[2]["inputs"].dtype == np.uint8
  units, mask = UnitLoader(source, one_label((4, 4, 3), 2, (0.0, 255.0))).load(np.arange(3), 4)
  assert units["inputs"][:, 0, 0, 0, 0].tolist() == [0, 30, 60, 0] and mask.sum() == 3


def test_vectors_and_arrays(tmp_path):
  source = _open(_save(tmp_path), image_column="vector")
  assert source.info.input_shape == (4,) and source.info.value_range == (-1.0, 1.0)
  batch = source.gather(np.array([3, 1]))
  np.testing.assert_array_equal(batch["inputs"], VECTORS[[3, 1]])
  assert batch["inputs"].dtype == np.float32 and batch["label"].tolist() == [1, 1]
  assert [*source.gather(np.zeros(0, np.int64))] == []
  source = _open(str(tmp_path), image_column="array")
  assert source.info.input_shape == (2, 2, 2) and source.info.input_dtype == "uint8"
  batch = source.gather(np.array([6]))
  assert batch["inputs"].dtype == np.uint8
  assert batch["inputs"].ravel().tolist() == list(range(48, 56))


def test_missing_and_corrupt_values_are_errors_of_their_records(tmp_path):
  columns, _ = _columns()
  scans = [*columns["scan"]]
  scans[1] = {"bytes": b"no image", "path": None}
  file = tmp_path / "scan.png"
  file.write_bytes(_png(150))
  scans[5] = {"bytes": None, "path": str(file)}  # which is copied when the data set is saved
  scans[4] = None
  vectors = [*columns["vector"]]
  vectors[2] = None
  findings = [*columns["finding"]]
  findings[6] = None
  path = _save(tmp_path / "a", scan=scans, vector=vectors, finding=findings)
  file.unlink()
  for options, bad in (
    ({"input_shape": (4, 4, 3)}, {1, 4, 6}),
    ({"image_column": "vector"}, {2, 6}),
  ):
    source = _open(path, **options)
    records = [*source.gather(np.arange(COUNT))]
    assert {i for i, record in enumerate(records) if isinstance(record, RecordError)} == bad
    loader = UnitLoader(source, one_label(source.info.input_shape, 2, source.info.value_range))
    units, _ = loader.load(np.arange(COUNT), COUNT)
    assert {*np.flatnonzero(~units["record_mask"][:, 0])} == bad == {*loader.bad_records}
    with pytest.raises(RecordError):
      source[min(bad)]


def test_further_columns(tmp_path):
  source = _open(_save(tmp_path), image_column="vector")
  assert source.column("patient").tolist() == [f"p{i // 2}" for i in range(COUNT)]
  ages = source.column("age")
  assert ages.dtype == np.float32 and np.isnan(ages[1]) and ages[0] == 40.5
  told = "no column 'sex'; its columns: age, array, finding"
  with pytest.raises(ValueError, match=told), telling(True):
    source.column("sex")


def _column(path, values, kind):
  columns = {"x": [[0.0, 1.0]] * len(values), "label": [0] * len(values), "person": values}
  features = {"x": datasets.List(datasets.Value("float32"), length=2),
              "label": datasets.Value("int64"), "person": kind}  # fmt: skip
  whole = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
  datasets.DatasetDict({"train": whole}).save_to_disk(str(path))
  return _open(str(path), image_column="x").column("person")


def test_ids_of_a_column_stay_apart_whatever_its_type(tmp_path):
  """P19: as floats, which missing values would make of them, the first two are one number."""
  large = _column(tmp_path / "a", [2**53, 2**53 + 1, None, 7], datasets.Value("int64"))
  assert large.tolist() == ["9007199254740992", "9007199254740993", "", "7"]
  binary = _column(tmp_path / "b", [b"p1", b"p1 ", None, b"NA"], datasets.Value("binary"))
  assert UnitIndex.from_ids(binary, 2).unit_of_records.tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize(("values", "kind"), [
  ([["a"], ["a", "b"], ["b"]], datasets.List(datasets.Value("string"))),
  ([{"id": 1}, {"id": 2}, {"id": 1}], {"id": datasets.Value("int64")}),
])  # fmt: skip
def test_a_record_of_several_people_is_not_one_of_a_third(tmp_path, values, kind):
  with pytest.raises(ValueError, match="column 'person' has no one value for each record"):
    _column(tmp_path, values, kind)


def test_the_fingerprint_follows_records_and_columns(tmp_path):
  first = _open(_save(tmp_path / "a"), image_column="vector")
  assert first.fingerprint() == _open(str(tmp_path / "a"), image_column="vector").fingerprint()
  assert first.fingerprint() != _open(str(tmp_path / "a"), image_column="array").fingerprint()
  changed = _save(tmp_path / "b", vector=(VECTORS + 1).tolist())
  assert first.fingerprint() != _open(changed, image_column="vector").fingerprint()


def test_what_is_no_data_set_is_refused(tmp_path, monkeypatch):
  path = _save(tmp_path / "a")
  with pytest.raises(ValueError, match=r"set data\.path"):
    open_source("hf", "train")
  with pytest.raises(ValueError, match="no such folder"):
    _open(str(tmp_path / "missing"))
  with pytest.raises(ValueError, match="was not saved by"):
    _open(str(tmp_path))
  with pytest.raises(ValueError, match="no splits"):
    _open(path + "/train")
  with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
    _open(path, "validation")
  with pytest.raises(ValueError, match=r"declare data\.input_shape"):
    _open(path)
  told = r"no column 'x': set data\.image_column; its columns: scan"
  with pytest.raises(ValueError, match=told), telling(True):
    _open(path, image_column="x")
  with pytest.raises(ValueError, match="must hold images, vectors"):
    _open(path, image_column="patient")
  with pytest.raises(ValueError, match="column 'patient' holds no labels"):
    _open(path, image_column="vector", label_columns=("patient",))
  without = _save(tmp_path / "b", scan=None)
  with pytest.raises(ValueError, match="no or several columns of images"):
    _open(without)
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ValueError, match=r"pip install 'dp_jax\[hf\]'"):
    _open(path)


def test_a_data_set_in_memory_is_a_source_by_its_records():
  columns, _ = _columns()
  rows = datasets.Dataset.from_dict({
    "inputs": VECTORS.tolist(), "label": columns["finding"], "patient": columns["patient"],
  })  # fmt: skip
  source = as_source(rows, "mine", Context(value_range=(-1.0, 1.0)))
  np.testing.assert_array_equal([each["inputs"] for each in source.gather([0, 6])], VECTORS[[0, 6]])
  assert source.column("patient").tolist() == columns["patient"]
