"""Short forms of experiments/fairness: a planted gap is found, equal models raise few alarms."""

from experiments.fairness import coverage, power


def test_a_planted_gap_is_found():
  """At a power of 95%, fewer than 9 of 15 have a probability below 1e-6."""
  found = power.study(15, power.PLANTED)
  assert found["sex f"]["widened"] >= 9 / 15
  assert found["largest gap by sex"]["widened"] >= 9 / 15


def test_equal_models_raise_few_alarms():
  """At 5% of false alarms, more than 13 of 40 have a probability below 1e-7."""
  for verdicts in power.study(40, 0.0).values():
    assert verdicts["no evidence either way"] >= 27 / 40


def test_people_are_resampled_and_records_would_not_do():
  """At 95%, fewer than 25 of 40 intervals hold the truth with a probability below 1e-9."""
  held = coverage.study(40, large=40_000, resamples=200)
  assert min(held["people"].values()) >= 25 / 40
  assert held["records"]["accuracy, overall"] < held["people"]["accuracy, overall"]
