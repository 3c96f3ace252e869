"""Units: padding, masks, malformed records, and grouping."""

import numpy as np
import pytest
from support import one_label

from dp_jax.data import (
  ArraySource,
  RecordError,
  SourceInfo,
  UnitLoader,
  check_records,
  open_source,
)
from dp_jax.data import records as records_module
from dp_jax.data import units as units_module

SPEC = one_label(input_shape=(2, 3, 1), num_classes=4, value_range=(0.0, 1.0))


class ListSource:
  """Records of any shape, one by one, as a source of files would give them."""

  def __init__(self, records, input_shape=None, input_dtype="float32"):
    self._records = records
    self.info = SourceInfo(
      "list", len(records), input_shape, None, (0.0, 1.0), input_dtype=input_dtype
    )

  def __len__(self):
    return len(self._records)

  def __getitem__(self, index):
    return self._records[index]

  def gather(self, indices):
    return [self[int(index)] for index in indices]

  def fingerprint(self):
    return "list"


def _image(value=1.0, shape=(2, 3, 1), dtype=np.float32):
  return np.full(shape, value, dtype)


def _array_source(labels):
  info = SourceInfo("arrays", len(labels), (2, 3, 1), None, (0.0, 255.0))
  images = np.arange(len(labels) * 6, dtype=np.uint8).reshape(-1, 2, 3, 1)
  return ArraySource(info, images, np.asarray(labels, np.int64))


def test_padding_and_masks():
  source = open_source("digits", "train")
  loader = UnitLoader(source, one_label((8, 8, 1), 10, (0.0, 16.0)))
  assert loader.num_units == 1437
  units, mask = loader.load(np.array([5, 0, 1436]), 8)
  assert units["inputs"].shape == (8, 1, 8, 8, 1) and units["inputs"].dtype == np.uint8
  assert units["label"].shape == (8, 1) and units["label"].dtype == np.int32
  np.testing.assert_array_equal(mask, [True] * 3 + [False] * 5)
  np.testing.assert_array_equal(units["record_mask"][:, 0], mask)
  np.testing.assert_array_equal(units["inputs"][0, 0], source[5]["inputs"])
  assert units["label"][2, 0] == source[1436]["label"]
  assert not units["inputs"][3:].any() and not units["label"][3:].any()
  assert loader.bad_records == {}


def test_an_empty_batch_has_the_same_shapes():
  loader = UnitLoader(_array_source([0, 1]), SPEC)
  units, mask = loader.load(np.zeros(0, np.int64), 4)
  full, _ = loader.load(np.array([0, 1]), 4)
  assert not mask.any() and not units["record_mask"].any()
  for name in full:
    assert units[name].shape == full[name].shape and units[name].dtype == full[name].dtype


def test_a_label_out_of_range_has_zero_weight():
  loader = UnitLoader(_array_source([0, 4, 3, -1]), SPEC)
  units, mask = loader.load(np.arange(4), 5)
  np.testing.assert_array_equal(units["record_mask"][:, 0], [True, False, True, False, False])
  np.testing.assert_array_equal(mask, [True] * 4 + [False])  # the unit stays in the batch
  assert units["label"].max() == 3 and units["label"].min() == 0
  assert not units["inputs"][[1, 3]].any()
  assert loader.bad_records == {1: "label 4 is outside 0..3", 3: "label -1 is outside 0..3"}


BAD = [
  ({"inputs": _image(shape=(3, 3, 1)), "label": 0}, r"shape \(3, 3, 1\), not \(2, 3, 1\)"),
  ({"inputs": _image(shape=(2, 3)), "label": 0}, r"shape \(2, 3\)"),
  ({"inputs": _image(), "label": 7}, r"label 7 is outside 0\.\.3"),
  ({"inputs": _image(), "label": 1.0}, "label must be one integer"),
  ({"inputs": _image(), "label": np.array([1])}, "label must be one integer"),
  ({"inputs": np.full((2, 3, 1), "a"), "label": 1}, "dtype"),
  (RecordError("cannot be decoded: EOFError"), "cannot be decoded"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_one_bad_record(bad, message):
  source = ListSource([{"inputs": _image(), "label": 2}, bad, {"inputs": _image(0.5), "label": 3}])
  loader = UnitLoader(source, SPEC)
  units, mask = loader.load(np.array([0, 1, 2]), 3)
  np.testing.assert_array_equal(units["record_mask"][:, 0], [True, False, True])
  assert mask.all()
  np.testing.assert_array_equal(units["label"][:, 0], [2, 0, 3])
  assert list(loader.bad_records) == [1]
  for refuse in (
    lambda: check_records(source, SPEC),
    lambda: UnitLoader(source, SPEC, strict=True).load(np.array([2, 1]), 2),
  ):
    with pytest.raises(ValueError, match=f"record 1 of list: .*{message}"):
      refuse()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_record_of_values_that_are_not_finite_is_malformed(value, stacked):
  """One pixel is enough; 1e300 does not fit into the float32 of a batch."""
  images = np.zeros((3, 2, 3, 1))
  images[1, 1, 2] = value
  if stacked:
    with np.errstate(over="ignore"):
      images = images.astype(np.float32)
    info = SourceInfo("arrays", 3, (2, 3, 1), None, (0.0, 1.0), input_dtype="float32")
    source = ArraySource(info, images, np.zeros(3, np.int64))
  else:
    source = ListSource([{"inputs": image, "label": 0} for image in images])
  loader = UnitLoader(source, SPEC)
  units, mask = loader.load(np.arange(3), 4)
  assert units["record_mask"][:, 0].tolist() == [True, False, True, False] and mask.sum() == 3
  assert units["inputs"].dtype == np.float32 and not units["inputs"].any()
  assert loader.bad_records == {1: "the inputs hold numbers that are not finite"}
  with pytest.raises(ValueError, match=r"record 1 of \w+: the inputs hold numbers that are"):
    check_records(source, SPEC)


def test_check_records_names_the_first_of_several_in_a_later_chunk():
  labels = np.zeros(3000, np.int64)
  check_records(_array_source(labels), SPEC)
  labels[[2500, 2100]] = 9
  with pytest.raises(ValueError, match="record 2100 of arrays: label 9"):
    check_records(_array_source(labels), SPEC)


def test_units_of_several_records():
  """A unit with more than K records is cut by a rule that depends on it alone."""
  labels = [0, 1, 2, 3, 0, 9]
  loader = UnitLoader(
    _array_source(labels), SPEC, max_records_per_unit=2, unit_ids=["b", "a", "b", "b", "c", "c"]
  )
  assert loader.num_units == 3 and loader.max_records_per_unit == 2
  # Units are numbered by their ids, so "a" is the first though "b" occurs before it.
  units, mask = loader.load(np.array([2, 1, 0]), 4)
  assert units["inputs"].shape == (4, 2, 2, 3, 1)
  np.testing.assert_array_equal(units["label"], [[0, 0], [0, 2], [1, 0], [0, 0]])
  np.testing.assert_array_equal(
    units["record_mask"], [[True, False], [True, True], [True, False], [False, False]]
  )
  np.testing.assert_array_equal(mask, [True, True, True, False])
  assert units["inputs"][1, 1, 0, 0, 0] == 2 * 6  # the third record
  # Other units' records in between do not change which two are kept.
  moved = UnitLoader(
    _array_source([0, 2, 3]), SPEC, max_records_per_unit=2, unit_ids=["b", "b", "b"]
  )
  np.testing.assert_array_equal(moved.load(np.array([0]), 1)[0]["label"], [[0, 2]])


def test_what_contradicts_the_declaration_is_refused_at_once():
  source = open_source("digits", "train")
  with pytest.raises(ValueError, match=r"images of shape \(8, 8, 1\), but \(28, 28, 1\)"):
    UnitLoader(source, one_label((28, 28, 1), 10, (0.0, 16.0)))
  with pytest.raises(ValueError, match="10 classes, but 7 are declared"):
    UnitLoader(source, one_label((8, 8, 1), 7, (0.0, 16.0)))
  with pytest.raises(ValueError, match="max_records_per_unit must be at least 1, not 0"):
    UnitLoader(_array_source([0]), SPEC, max_records_per_unit=0)
  for ids, units, message in (
    ([1, 2], None, "2 unit_ids for 1 records"),
    (["a"], ["a", "b", "a"], "units lists 3 ids, of which 2 differ"),
    (["a"], [("a", "b")], "entry 0 has a unit id that is no one number"),
    (None, ["a"], "units are given without unit_ids"),
  ):
    with pytest.raises(ValueError, match=message):
      UnitLoader(_array_source([0]), SPEC, unit_ids=ids, units=units)
  with pytest.raises(ValueError, match="mix types that have no order"):
    UnitLoader(_array_source([0, 1]), SPEC, unit_ids=["a", 1])
  for shape, classes, values in (
    ((2, 3), 4, (0.0, 1.0)),
    ((2, 3, 0), 4, (0.0, 1.0)),
    ((2, 3, 1), 0, (0.0, 1.0)),
    ((2, 3, 1), 4, (1.0, 1.0)),
  ):
    with pytest.raises(ValueError, match=r"input_shape|num_classes|value_range"):
      one_label(shape, classes, values)


def test_indices_are_checked():
  loader = UnitLoader(_array_source([0, 1, 2]), SPEC)
  with pytest.raises(ValueError, match=r"indices of shape \(3,\) into a batch of 2"):
    loader.load(np.arange(3), 2)
  with pytest.raises(ValueError, match=r"units 0\.\.3 asked for, but there are 3"):
    loader.load(np.array([0, 3]), 4)
  with pytest.raises(ValueError, match=r"units -1\.\.0"):
    loader.load(np.array([-1, 0]), 4)


def test_padding_and_malformed_records_are_zero_whatever_the_memory_held(monkeypatch):
  aligned = records_module.aligned_empty
  for module in (records_module, units_module):
    monkeypatch.setattr(module, "aligned_empty", lambda *what: _filled(aligned(*what)))
  info = SourceInfo("x", 4, (2, 2, 1), 3, (0.0, 255.0))
  records = ArraySource(info, np.ones((4, 2, 2, 1), np.uint8), np.array([0, 9, 1, 2]))
  loader = UnitLoader(
    records, one_label((2, 2, 1), 3, (0.0, 255.0)), max_records_per_unit=2, unit_ids=[0, 0, 1, 2]
  )
  loaded, mask = loader.load(np.arange(3), 4)
  assert mask.tolist() == [True, True, True, False]
  assert loaded["record_mask"].tolist() == [
    [True, False],
    [True, False],
    [True, False],
    [False] * 2,
  ]
  real = loaded["inputs"].reshape(4, 2, -1).min(-1)
  np.testing.assert_array_equal(real, loaded["record_mask"])
  assert loaded["inputs"].max() == 1 and loaded["inputs"].ctypes.data % 64 == 0
  assert loaded["label"].tolist() == [[0, 0], [1, 0], [2, 0], [0, 0]]


def _filled(array):
  array.fill(7)
  return array
