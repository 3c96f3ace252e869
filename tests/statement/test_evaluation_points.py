"""The mapping to NIST SP 800-226 says something about every point, and only what holds."""

import copy

import pytest
from made_up_runs import ROW_RUNS, row_record

from dp_jax.statement import schema
from dp_jax.statement.evaluation_points import TITLES, evaluation_points, titled


@pytest.mark.parametrize("name", ROW_RUNS)
def test_every_point_of_every_row_has_a_sentence(name):
  record = row_record(name)
  points = record["nist_sp_800_226"]
  assert set(points) == set(TITLES) == set(evaluation_points(record))
  assert schema.problems(record) == []
  for text in points.values():
    assert text.endswith(".") and text[0].isupper() and "None" not in text and "  " not in text
  assert [title for title, _ in titled(points)] == list(TITLES.values())


def test_the_unit_is_bounded_only_where_its_number_is_public():
  assert row_record("poisson")["nist_sp_800_226"]["unit_of_privacy"].count("Bounded: ") == 1
  unbounded = row_record("poisson unbounded")["nist_sp_800_226"]
  assert "Unbounded: " in unbounded["unit_of_privacy"]
  assert "not public" in unbounded["privacy_parameters"]


@pytest.mark.parametrize(
  ("epsilon", "words"),
  [(0.3, "up to about 1 for strong"), (3.0, "lies between about 1"), (12.0, "doubt")],
)
def test_epsilon_is_read_as_the_guidelines_read_it(record, epsilon, words):
  text = evaluation_points({**record, "epsilon": epsilon})["privacy_parameters"]
  assert words in text


@pytest.mark.parametrize(("delta", "words"), [(1e-7, "which this meets"), (1e-5, "does not meet")])
def test_delta_is_compared_with_the_number_of_units(record, delta, words):
  text = evaluation_points({**record, "delta": delta})["privacy_parameters"]
  assert words in text and "N = 1,437" in text


def test_numbers_are_those_of_the_record(record):
  changed = copy.deepcopy(record)
  changed["ledger"] |= {"releases": 3, "epsilon": 2.5}
  changed["max_records_per_unit"] = 7
  points = evaluation_points(changed)
  assert "3 releases" in points["other_releases"] and "2.5" in points["other_releases"]
  assert "at most 7 records" in points["data_collection"]
  assert "up to 7 records" in points["unit_of_privacy"]


def test_measured_accuracy_is_promised_for_public_data_alone(record):
  assert "report.html" in evaluation_points(record)["utility"]
  private = evaluation_points({**record, "declared": "private"})
  assert "report.html" not in private["utility"] + private["bias"]


def test_a_test_key_claims_nothing(record):
  record["randomness"]["test_key"] = True
  points = evaluation_points(record)
  assert points["privacy_parameters"].startswith("Not private: fixed seed. With a secret key:")
  assert "nothing holds" in points["threat_model"]
