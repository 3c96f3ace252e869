"""The statement says what is guaranteed, and no more."""

import dataclasses
import math
import re

import jax.numpy as jnp
import pytest
from made_up_runs import row_record

from dp_jax import privacy
from dp_jax.gradients.noise import gaussian
from dp_jax.statement import privacy_json
from dp_jax.statement.sentences import PLAIN_STATEMENT, sampling_phrase, statement
from dp_jax.statement.statement_items import statement_long


def test_two_sentences_with_everything_a_reader_needs(record):
  text = statement(record)
  assert text.count(". ") == 1 and text.endswith(".")
  for word in ("scan", "(1, 1e-5)", "zero-out", "20 planned steps", "1,437", "norm of 1.5"):
    assert word in text
  assert record["accountant_version"] in text
  assert "does not cover" in text


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("poisson", ["independently with probability 0.25", "blanking"]),
    ("poisson replaced", ["replacing any one scan by another"]),
    ("poisson unbounded", ["adding or removing any one scan (add-or-remove-one adjacency)"]),
    ("truncated_poisson", ["cut to at most 600 units"]),
    ("fixed_size", ["60 units without replacement"]),
    ("stream", ["no amplification by sampling"]),
    ("full_batch", ["all units"]),
  ],
)
def test_sampling_and_adjacency(name, words):
  record = row_record(name)
  for word in words:
    assert word in statement(record)
  assert sampling_phrase(record) in statement_long(record)


def test_test_key_claims_nothing(facts):
  record = privacy_json.privacy_record(facts(test_key=True))
  # Nor does what the ledger holds in all.
  record["ledger"] |= {"releases": 2, "epsilon": 1.5}
  assert statement(record).startswith("Not private: fixed seed.")
  assert "satisfy" not in statement(record) and "total" not in statement(record)
  assert "not private: fixed seed" in statement_long(record)
  assert "Not private: fixed seed" in statement_long(record).split("\n")[1]


def test_the_sampler_is_described_as_it_is(record):
  """The smallest uniform behind a radius is half of 2^-bits, which the sampler returns."""
  zero = jnp.zeros(1, jnp.uint32)
  high, _ = gaussian.from_bits(zero, zero, zero, zero)
  reach = float(jnp.hypot(high[0, 0], high[1, 0]))
  words = re.search(r"radius from (\d+) random bits", statement_long(record))
  assert words is not None
  assert reach == pytest.approx(math.sqrt(2 * (int(words[1]) + 1) * math.log(2)), rel=1e-6)
  # The broken variant, another number of bits, is told apart.
  assert reach != pytest.approx(math.sqrt(2 * 65 * math.log(2)), rel=1e-3)


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
    (
      {
        "mechanism": privacy.Mechanism(
          privacy.FullBatch(), 8.0, 3, 1.5, "add_or_remove_one", declared_batch_size=1437.0
        ),
        "spec": privacy.PrivacySpec(1.0, 1e-5, adjacency="add_or_remove_one"),
      },
      "to state the number of units is to break the guarantee",
    ),
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
