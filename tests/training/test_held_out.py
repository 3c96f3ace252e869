"""What is kept of a run's evaluation: a run that is done is not lost for the ids it meets."""

import numpy as np
import pytest
from support import small_config

from dp_jax.training.held_out import people_of

NAN = float("nan")


class _Source:
  def __init__(self, ids):
    self._ids = ids

  def __len__(self):
    return 4

  def column(self, name):
    if self._ids is None:
      raise ValueError(f"no column {name!r}")
    return self._ids


def _people(ids):
  return people_of(small_config(privacy__unit="person", data__num_records=None), _Source(ids))


@pytest.mark.parametrize("ids", [
  None, np.array([""] * 4), np.full(4, NAN), np.array([None] * 4, object), np.zeros((4, 2), int),
  np.array([1, "a", None, 2.5], object), np.array([["a"], ("b",), {}, 1], object),
  np.array([2**80, 1, 2, 3], object), np.array(["2020-01-01"] * 4, "datetime64[D]"),
  np.array([1 + 2j] * 4), np.array([b"a", "b", 1, None], object), np.array(["a", "b"]), object(),
  np.array([np.array([1, 2]), np.array([3, 4]), None, 1], object),
])  # fmt: skip
def test_ids_of_any_kind_leave_each_record_its_own(ids):
  unit, people = _people(ids)
  assert unit == "record" and people.tolist() == [0, 1, 2, 3]


def test_a_record_without_an_id_is_its_own_person():
  unit, people = _people(np.array(["b", "", "b", "a"]))
  assert unit == "person" and people[0] == people[2] and len(set(people)) == 3
