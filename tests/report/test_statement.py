"""The statement says what is guaranteed, and no more."""

import dataclasses

import pytest

from dp_jax import privacy
from dp_jax.report import privacy_json
from dp_jax.report.statement import PLAIN_STATEMENT, sampling_phrase, statement, statement_long


def test_two_sentences_with_everything_a_reader_needs(record):
  text = statement(record)
  assert text.count(". ") == 1 and text.endswith(".")
  for word in ("scan", "(1, 1e-5)", "zero-out", "20 planned steps", "1,437", "norm of 1.5"):
    assert word in text
  assert record["accountant_version"] in text
  assert "does not cover" in text


@pytest.mark.parametrize(
  ("sampling", "adjacency", "words"),
  [
    (privacy.Poisson(0.25), "zero_out", ["independently with probability 0.25", "blanking"]),
    (privacy.Poisson(0.25), "replace_one", ["replacing any one scan by another"]),
    (privacy.FixedSize(60, 1437), "replace_one", ["60 units without replacement"]),
    (privacy.Stream(100, 1437), "zero_out", ["no amplification by sampling"]),
    (privacy.FullBatch(), "zero_out", ["all units"]),
  ],
)
def test_sampling_and_adjacency(facts, sampling, adjacency, words):
  spec = privacy.PrivacySpec(epsilon=8.0, delta=1e-5, unit="scan", adjacency=adjacency)
  record = privacy_json.privacy_record(facts(spec=spec, sampling=sampling, steps=3))
  for word in words:
    assert word in statement(record)
  assert sampling_phrase(record) in statement_long(record)


def test_test_key_claims_nothing(facts):
  record = privacy_json.privacy_record(facts(test_key=True))
  assert statement(record).startswith("Not private: fixed seed.")
  assert "satisfy" not in statement(record)
  assert "not private: fixed seed" in statement_long(record)


def test_large_delta_is_warned_of(facts):
  spec = privacy.PrivacySpec(epsilon=1.0, delta=1e-3)
  record = privacy_json.privacy_record(facts(spec=spec, num_units=1000))
  assert len(record["warnings"]) == 1
  assert "Warning: delta 0.001 is not below one over the number of units (1,000)" in statement(
    record
  )
  record = privacy_json.privacy_record(facts(spec=spec, num_units=999))
  assert record["warnings"] == []


def test_epsilon_is_rounded_up(record):
  shown = statement({**record, "epsilon": 0.49991})
  assert "(0.5, 1e-5)" in shown


def test_long_statement_gives_unrounded_numbers(record):
  text = statement_long(record)
  for name in ("epsilon", "delta", "noise_multiplier", "stddev", "mean_stddev", "tail_delta"):
    assert str(record[name]).removesuffix(".0").replace("e-0", "e-") in text
  for name in ("adjacency", "unit", "hyperparameter", "ledger", "setting"):
    assert name in text.lower()


def test_plain_statement_says_so():
  assert "without differential privacy" in PLAIN_STATEMENT


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"declared": "secret"}, "declared"),
    ({"ledger_entries": []}, "ledger does not hold"),
    ({"expected_batch_size": 1436.0}, "divisor"),
    ({"num_units": None}, "num_units is None"),
    ({"trainable_parameters": 43}, "trainable_parameters"),
    ({"spec": privacy.PrivacySpec(1.0, 1e-5, adjacency="replace_one")}, "adjacency"),
  ],
)
def test_contradicting_facts_are_refused(facts, changes, message):
  with pytest.raises(ValueError, match=message):
    privacy_json.privacy_record(dataclasses.replace(facts(), **changes))


def test_a_mechanism_without_noise_is_refused(facts):
  mechanism = privacy.Mechanism(privacy.FullBatch(), 0.0, 20)
  with pytest.raises(ValueError, match="no finite epsilon"):
    privacy_json.privacy_record(dataclasses.replace(facts(), mechanism=mechanism))
