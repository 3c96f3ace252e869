"""Grouping by ids of every type, against a loop; what is no id."""

import numpy as np
import pytest

from dp_jax.data.sources.source import telling
from dp_jax.data.unit_index import UnitIndex


def by_a_loop(ids, slots, units=None):
  groups = {each: [] for each in (sorted(set(ids)) if units is None else units)}
  for index, each in enumerate(ids):
    groups[each].append(index)
  return [(own[:slots] + [-1] * slots)[:slots] for own in groups.values()]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", ["int", "big", "str", "float", "bytes", "objects", "list"])
def test_groups_are_those_of_a_loop(kind, slots):
  numbers = np.random.default_rng(3).integers(0, 40, 300)
  ids = {
    "int": numbers - 20,
    "big": numbers + 2**62,
    "str": np.char.add("patient ", numbers.astype(str)),
    "float": numbers / 8,
    "bytes": numbers.astype("S"),
    "objects": np.array([f"p{i}" for i in numbers], object),
    "list": [int(i) for i in numbers],
  }[kind]
  index = UnitIndex.from_ids(ids, slots)
  plain = list(ids) if kind in ("objects", "list") else ids.tolist()
  np.testing.assert_array_equal(index.members, by_a_loop(plain, slots))
  names = sorted(set(plain))
  assert [names[unit] for unit in index.unit_of_records] == plain
  assert index.num_cut == sum(max(0, plain.count(each) - slots) for each in names)
  units = [*names[::-1], *([10**6] if kind in ("int", "list") else [])]
  listed = UnitIndex.from_ids(ids, slots, units)
  np.testing.assert_array_equal(listed.members, by_a_loop(plain, slots, units))
  assert not index.without_unit and not listed.without_unit


def test_each_record_its_own_unit():
  index = UnitIndex.of_records(3, 2)
  np.testing.assert_array_equal(index.members, [[0, -1], [1, -1], [2, -1]])
  np.testing.assert_array_equal(index.unit_of_records, [0, 1, 2])


def test_records_of_no_unit_are_in_none_of_them():
  index = UnitIndex.from_ids(np.array(["b", "", "a", "c"]), 2, ["c", "b", "d"])
  np.testing.assert_array_equal(index.members, [[3, -1], [0, -1], [-1, -1]])
  np.testing.assert_array_equal(index.unit_of_records, [1, -1, -1, 0])
  assert index.without_unit == {
    1: "has no unit id, so it belongs to no unit",
    2: "belongs to no unit on the list",
  }
  numbers = UnitIndex.from_ids([7, None, 5], 1)
  np.testing.assert_array_equal(numbers.members, [[2], [0]])


def test_what_is_no_list_of_ids_is_refused():
  for ids, units, message in (
    (np.zeros((2, 2)), None, r"for each record, not float64 of shape \(2, 2\)"),
    (np.zeros(2, complex), None, "one number or string"),
    ([1, "a"], None, "mix types that have no order"),
    ([2**53 + 1, 0.5], None, "too large to tell apart"),
    ([10**30], None, "too large to tell apart"),
    (["", None], None, "no record has a unit id"),
    ([1], ["1"], "the ids of records are int64, those of units <U1"),
    (["a"], ["a", ""], "entry 1 of units is empty"),
  ):
    with pytest.raises(ValueError, match=message), telling(True):
      UnitIndex.from_ids(ids, 1, units)
