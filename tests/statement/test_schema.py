"""The schema accepts a record, and refuses each kind of malformed one."""

import copy

import pytest

from dp_jax.statement import schema


def test_a_record_is_valid(record):
  assert schema.problems(record) == []


@pytest.mark.parametrize("name", sorted(schema.load()["required"]))
def test_every_field_is_required(record, name):
  del record[name]
  assert schema.problems(record) == [f"privacy.json lacks {name}"]


@pytest.mark.parametrize(
  ("path", "value"),
  [
    (["epsilon"], -1),
    (["epsilon"], "0.5"),
    (["epsilon"], True),
    (["epsilon"], float("inf")),
    (["delta"], 0),
    (["delta"], 1.5),
    (["steps"], 1.5),
    (["steps"], 0),
    (["adjacency"], "swap"),
    (["schema_version"], 3),
    (["schema_version"], True),
    (["digest"], "0" * 63),
    (["unit"], ""),
    (["not_covered"], []),
    (["software", "jax"], 1),
    (["randomness", "key_bits"], 0),
    (["attacker", "trade_off", 0, "false_positive_rate"], 2.0),
    (["attacker", "extra"], 1),
    (["extra"], 1),
    (["pretrained_weights"], 3),
    (["mechanism"], []),
  ],
)
def test_malformed_values_are_named(record, path, value):
  broken = copy.deepcopy(record)
  inner = broken
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = value
  problems = schema.problems(broken)
  assert len(problems) == 1
  assert str(path[-1]) in problems[0]


def test_the_checker_knows_every_keyword_of_the_schema(record):
  # An unknown keyword would be ignored, so it is an error instead.
  with pytest.raises(RuntimeError, match="multipleOf"):
    list(schema._check(3, {"multipleOf": 2}, "x"))
