"""Which spellings are one id, which are told apart and only look alike, and which are no id."""

import numpy as np
import pytest

from dp_jax.data import open_source
from dp_jax.data.sources.source import telling
from dp_jax.data.unit_ids import canonical, look_alike
from dp_jax.data.unit_index import UnitIndex

COMPOSED, DECOMPOSED = "ren\u00e9", "rene\u0301"


@pytest.mark.parametrize(("one", "other"), [
  ("p1", "p1 "), ("p1", " p1"), ("p1", "p1\u00a0"), ("p1", "\ufeffp1"), ("p1", "p1\t\u200b "),
  ("7", "7.0"), ("7", "7."), ("7", "7.000 "), (COMPOSED, DECOMPOSED),
])  # fmt: skip
def test_spellings_that_can_mean_but_one_are_one_unit(one, other):
  """P19: as two units, a person would move the sum by twice the clip norm."""
  for ids in ([one, "q", other], np.array([one, "q", other]), np.array([one, "q", other], object)):
    index = UnitIndex.from_ids(ids, 2)
    assert sorted(index.members.tolist()) == [[0, 2], [1, -1]]
    assert index.num_respelled == 1 and not index.look_alike
  with pytest.raises(ValueError, match="units lists 2 ids, of which 1 differ"):
    UnitIndex.from_ids([one], 1, [one, other])
  assert UnitIndex.from_ids([other, "q"], 1, ["q", one]).unit_of_records.tolist() == [1, 0]


@pytest.mark.parametrize(("one", "other"), [
  ("a", "A"), ("7", "07"), ("7", "+7"), ("7", "7e0"), ("7", "\uff17"), ("p 1", "p  1"),
  ("p1", "p01"), ("p1", "p\u200b1"), ("stra\u00dfe", "STRASSE"), ("1.5", "1.50"),
])  # fmt: skip
def test_spellings_that_may_mean_two_are_told_apart_and_listed(one, other):
  index = UnitIndex.from_ids([one, other, "q"], 1)
  assert len(index.members) == 3 and index.num_respelled == 0
  assert index.look_alike == (tuple(sorted([one, other])),)


def test_ids_that_differ_do_not_look_alike():
  ids = ["7", "70", "0.7", "1.5", "1.05", "p10", "p100", "p1", "ab", "a-b", "", "sha256 0", "-7"]
  assert look_alike(canonical(np.array(ids))) == ()


def test_numbers_and_texts_are_compared_across_splits():
  for ids in (
    np.array([7, 8]),
    np.array([7.0, 8.0]),
    np.array(["7.0", " 8"]),
    np.array([b"7", b"8"]),
  ):
    assert canonical(ids).tolist() == ["7", "8"]
  assert canonical(np.array([7.5, np.nan])).tolist() == ["7.5", ""]


NOBODY = ["", " ", "NA", "n/a", "#N/A", "<NA>", "nan", "None", "null", ".", "-", "?", "unknown",
          "Unknown", "MISSING", "not known"]  # fmt: skip


@pytest.mark.parametrize("text", NOBODY)
def test_what_stands_for_nobody_is_no_unit_unless_it_is_listed(text):
  """Else many people would be one unit, and one of them is not all of it."""
  index = UnitIndex.from_ids(["ann", text, "bob", text], 4)
  assert len(index.members) == 2 and index.unit_of_records.tolist() == [0, -1, 1, -1]
  assert set(index.without_unit) == {1, 3}
  if text.strip():
    listed = UnitIndex.from_ids(["ann", text, "bob", text], 4, ["ann", text])
    assert listed.unit_of_records.tolist() == [0, 1, -1, 1]
    declared = UnitIndex.from_ids(["ann", text, "bob", text], 4, missing_values=("ann",))
    assert len(declared.members) == 2 and declared.unit_of_records[0] == -1
  assert UnitIndex.from_ids([1, -9, 2], 1, missing_values=("-9.0",)).unit_of_records[1] == -1


@pytest.mark.parametrize("text", ["-9.0", "-9", " -9 "])
def test_a_declared_id_of_nobody_is_compared_as_ids_are(text):
  index = UnitIndex.from_ids(["-9.0", "a", "-9", "b"], 2, missing_values=(text,))
  assert index.unit_of_records.tolist() == [-1, 0, -1, 1]


@pytest.mark.parametrize("ids", [
  np.array([2.0**53, 2.0**53 + 1, 3]), np.array([2**24, 2**24 + 1, 3], np.float32),
  np.array([2048, 2049, 3], np.float16), [2**53, 2**53 + 1, None], [2.0**53, 2.0**53 + 1, None],
])  # fmt: skip
def test_numbers_of_which_two_may_have_become_one_are_no_ids(ids):
  """P19: two people in one unit: without one of them its clipped sum is another."""
  with pytest.raises(ValueError, match="too large to tell apart; give them as strings"):
    UnitIndex.from_ids(ids, 2)


def test_what_is_not_finite_is_no_id():
  index = UnitIndex.from_ids(np.array([np.inf, 1, np.nan, 2, -np.inf]), 2)
  assert index.unit_of_records.tolist() == [-1, 0, -1, 1, -1]


def test_one_long_id_does_not_widen_all_others():
  ids = ["x" * 10**6, "y", "x" * 10**6, "x" * 10**6 + "z"]
  index = UnitIndex.from_ids(ids, 2)
  assert sorted(index.members.tolist()) == [[0, 2], [1, -1], [3, -1]]
  assert canonical(np.array(ids[:2])).dtype.itemsize < 1000


def test_a_share_of_people_goes_by_the_id_and_not_by_its_spelling(tmp_path):
  """P19: all rows of a person on one side, however they are written; nobody is held out."""
  people = [spelling for i in range(60) for spelling in (f"{i}", f" {i}.0", f"{i}\u00a0")]
  rows = "".join(f"{each},1,no\n" for each in [*people, "NA", "unknown"])
  (tmp_path / "all.csv").write_text("person,age,ill\n" + rows)
  keys = {
    "label_columns": ("ill",), "class_names": ("no", "yes"), "features": ("age",),
    "feature_ranges": ((0.0, 1.0),), "eval_fraction": 0.5, "unit": "person",
    "path": str(tmp_path / "all.csv"),
  }  # fmt: skip
  train, test = (
    {*canonical(open_source("csv", split, **keys).column("person")).tolist()}
    for split in ("train", "test")
  )
  assert not train & test and len(train | test) == 62 and {"NA", "unknown"} <= train
  assert 15 < len(test) < 45


def test_an_id_of_no_one_type_is_not_told(tmp_path):
  for ids in (["ann", ("canary", "b")], ["ann", 7]):
    with pytest.raises(ValueError) as error:
      UnitIndex.from_ids(ids, 1)
    assert "canary" not in str(error.value)
  with pytest.raises(ValueError, match="canary"), telling(True):
    UnitIndex.from_ids(["ann", ("canary", "b")], 1)


@pytest.mark.parametrize("ids", [
  [2**60 + 1, 2**60 + 2, None], [-(2**60) - 1, -(2**60) - 2, float("nan")],
  np.array([2**60 + 1, 2**60 + 2, np.nan]), np.array([2**24 + 1, 2**24, np.nan], np.float32),
])  # fmt: skip
def test_whole_numbers_that_a_missing_one_makes_floats_are_not_merged(ids):
  """P19: two people would be one unit, and whether they are would depend on a third."""
  with pytest.raises(ValueError, match="too large to tell apart"):
    UnitIndex.from_ids(ids, 1)
  assert len(UnitIndex.from_ids([2**60 + 1, 2**60 + 2], 1).members) == 2
  assert len(UnitIndex.from_ids([2**53 - 1, 2**53 - 2, None], 1).members) == 2
