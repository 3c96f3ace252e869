"""Writes a privacy record anew from its primary facts, and names what is another than stated.

Primary are the mechanism, the releases of the ledger, the target and what is declared: those that
`ReleaseFacts` holds. All else follows from them, by the same code that wrote it; that this code is
right is shown elsewhere, by tests that recompute epsilon without it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dp_jax.privacy import shares
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.statement import (
  evaluation_points,
  ledger_check,
  privacy_json,
  sentences,
  statement_items,
)
from dp_jax.statement.privacy_json import ReleaseFacts

Record = Mapping[str, Any]

# On what accountants give: what different machines may differ by.
TOLERANCE = 1e-6
_ACCOUNTED = ("epsilon", "tail_delta", "cross_check", "ledger", "attacker")
_ROUNDING = 1e-12
# Probabilities below this are the same; a tail is compared by its own size alone.
_SMALLEST = {"attacker": 1e-9, "epsilon": TOLERANCE, "cross_check": TOLERANCE, "ledger": TOLERANCE}
# The calibrated noise reaches the target from below, within this share of it.
TARGET_TOLERANCE = 1e-3
_PRIMARY = (
  "mechanism", "parts", "releases", "target", "delta", "unit", "adjacency", "expected_batch_size",
  "treated_as_public", "declared", "parameters", "pretrained_weights", "hyperparameter_selection",
  "randomness", "warnings", "evaluation",
)  # fmt: skip
# Texts are functions of the record as it is stated, and are compared as such, last.
_TEXTS = {
  "statement": sentences.statement,
  "statement_long": statement_items.statement_long,
  "nist_sp_800_226": evaluation_points.evaluation_points,
}


def contradictions(record: Record) -> list[str]:
  """What contradicts itself in a record that the schema accepts, without running an accountant."""
  found = []
  if privacy_json.record_digest(record) != record["digest"]:
    found.append("digest is not that of the record: a field was changed")
  try:
    facts = facts_of(record)
  except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
    return [*found, f"mechanism: {error}"]
  of_ledger = ledger_check.problems(facts.mechanism, record)
  return [*found, *of_ledger, *_copies(facts, record), *_lists(facts, record)]


def differences(record: Record) -> list[str]:
  """What a record without contradictions says otherwise than its primary facts; one line each."""
  primary = {name: record[name] for name in _PRIMARY if name in record}
  try:
    rebuilt = json.loads(_rebuilt(json.dumps(primary)))
    found = [
      *_differences(record, rebuilt),
      *_bounds(record),
      *ledger_check.budget_problems(Ledger.from_list(record["releases"]), record["unit"]),
    ]
  except ValueError as error:
    return [f"the record cannot be derived: {error}"]
  # Texts repeat every number, so they differ whenever something above does.
  return found or [
    f"{name} is not what the other fields say"
    for name, write in _TEXTS.items()
    if record[name] != write(record)
  ]


def facts_of(record: Record) -> ReleaseFacts:
  """The primary facts of a record.

  Raises:
    ValueError, TypeError, KeyError: if they are no facts of a release.
  """
  mechanism, parts = Mechanism.from_dict(record["mechanism"]), ledger_check.parts_of(record)
  if parts:
    whole = shares.joint(tuple(parts.values()))
    if math.isclose(whole.noise_multiplier, mechanism.noise_multiplier, rel_tol=_ROUNDING):
      mechanism = whole  # whose last bit may be another on another machine
  public = {**record["treated_as_public"]}
  num_units, limit = public.pop("num_units"), public.pop("max_records_per_unit")
  of_delta = privacy_json.delta_warnings(record["delta"], num_units)
  return ReleaseFacts(
    spec=PrivacySpec(
      record["target"]["epsilon"], record["target"]["delta"], record["unit"], record["adjacency"]
    ),
    mechanism=mechanism,
    parts=parts,
    ledger_entries=record["releases"],
    num_units=num_units,
    expected_batch_size=record["expected_batch_size"],
    max_records_per_unit=limit,
    trainable_parameters=record["parameters"]["trainable"],
    total_parameters=record["parameters"]["total"],
    declared=record["declared"],
    test_key=record["randomness"]["test_key"],
    public_facts=public,
    pretrained_weights=record["pretrained_weights"],
    hyperparameter_selection=record["hyperparameter_selection"],
    warnings=tuple(each for each in record["warnings"] if each not in of_delta),
  )


@functools.lru_cache(maxsize=8)
def _rebuilt(text: str) -> str:
  """The record of the primary facts in a record, which is given as JSON, as JSON."""
  stated = json.loads(text)
  rebuilt = privacy_json.privacy_record(facts_of(stated))
  digest, evaluation = stated["parameters"]["sha256"], stated["evaluation"]
  return json.dumps(privacy_json.bound(rebuilt, digest, evaluation))


def _copies(facts: ReleaseFacts, record: Record) -> Iterator[str]:
  """What stands in two places, of which the mechanism's is the primary one."""
  declared = getattr(facts.mechanism.sampling, "num_units", facts.num_units)
  if declared != facts.num_units:
    yield f"num_units is {facts.num_units}, but {declared} in the mechanism"
  if record["max_records_per_unit"] != facts.max_records_per_unit:
    yield "max_records_per_unit is not that of treated_as_public"
  if facts.num_units is not None and facts.mechanism.adjacency == "add_or_remove_one":
    yield "num_units is stated, which breaks the guarantee under adjacency add_or_remove_one"


def _differences(record: Record, rebuilt: Record) -> Iterator[str]:
  """The leaves that differ, but for texts and for what is compared in another way."""
  other = {*_TEXTS, "digest", "software", "not_covered", "accountant_version"}
  if record["accountant_version"] != rebuilt["accountant_version"]:
    # The reason names orders and discretisations, which another version may choose differently.
    other.add("accountant_reason")
  for name in sorted({*record, *rebuilt} - other):
    yield from _unlike(name, name, record.get(name), rebuilt.get(name))


def _unlike(name: str, field: str, stated: Any, derived: Any) -> Iterator[str]:
  if isinstance(stated, Mapping) and isinstance(derived, Mapping):
    for key in sorted({*stated, *derived}):
      yield from _unlike(f"{name}.{key}", field, stated.get(key), derived.get(key))
  elif isinstance(stated, list) and isinstance(derived, list) and len(stated) == len(derived):
    for index, pair in enumerate(zip(stated, derived, strict=True)):
      yield from _unlike(f"{name}[{index}]", field, *pair)
  elif not _same(field, stated, derived):
    yield f"{name} is {stated!r}, but {derived!r} when recomputed"


def _same(field: str, stated: Any, derived: Any) -> bool:
  numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (stated, derived))
  if not numbers:
    return type(stated) is type(derived) and bool(stated == derived)
  accounted = field in _ACCOUNTED
  tolerance = TOLERANCE if accounted else _ROUNDING
  return math.isclose(stated, derived, rel_tol=tolerance, abs_tol=_SMALLEST.get(field, 0.0))


def _bounds(record: Record) -> Iterator[str]:
  """What epsilon must lie between: the two other accountants, and the target."""
  epsilon, target = record["epsilon"], record["target"]["epsilon"]
  low, high = (record["cross_check"][n] for n in ("optimistic_pld_epsilon", "rdp_epsilon"))
  slack = TOLERANCE * max(1.0, epsilon)
  if low is not None and epsilon < low - slack:
    yield f"epsilon is {epsilon}, below the lower bound {low}"
  if high is not None and epsilon > high + slack:
    yield f"epsilon is {epsilon}, above the Renyi bound {high}"
  if epsilon > target:
    yield f"epsilon is {epsilon}, above the target of {target}"
  elif epsilon < target * (1 - TARGET_TOLERANCE):
    yield f"epsilon is {epsilon}, more than a thousandth below the target of {target}"


def _lists(facts: ReleaseFacts, record: Record) -> Iterator[str]:
  """Lists that may say more than is derived, but not less; and the versions."""
  for item in privacy_json.not_covered(facts):
    if item not in record["not_covered"]:
      yield f"not_covered leaves out: {item}"
  version = record["software"]["dp-accounting"]
  if record["accountant_version"] != f"dp-accounting {version}":
    yield f"accountant_version is {record['accountant_version']!r}, but software says {version}"
