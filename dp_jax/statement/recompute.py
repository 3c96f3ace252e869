"""The numbers of privacy.json that an accountant gives, computed anew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.statement import attacker, crosscheck, ledger_check

# On epsilon and on probabilities: what different machines may differ by.
TOLERANCE = 1e-6


def problems(mechanism: Mechanism, record: Mapping[str, Any]) -> list[str]:
  """What differs from the recomputed number, one line each.

  Args:
    mechanism: the record's, already found to agree with its other fields.
    record: the content of privacy.json.
  """
  try:
    found = list(_epsilon(mechanism, record))
    if found:
      return found  # All the rest costs more and hangs on these.
    return [
      *_ledger(record),
      *_cross(mechanism, record),
      *_attacker(mechanism, record),
    ]
  except ValueError as error:
    return [f"the mechanism cannot be accounted: {error}"]


def _epsilon(mechanism: Mechanism, record: Mapping[str, Any]) -> Iterator[str]:
  parts = ledger_check.parts_of(record)
  accounted = ledger_check.account_run(mechanism, parts, record["delta"])
  if not _same(record["epsilon"], accounted.epsilon):
    yield f"epsilon is {record['epsilon']}, but {accounted.epsilon} when recomputed"
  if record["accountant"] != accounted.accountant:
    yield f"accountant is {record['accountant']}, but {accounted.accountant} when recomputed"
  # The reason names orders and discretisations, which another version may choose differently.
  same = record["accountant_version"] == accounted.library_version
  if same and record["accountant_reason"] != accounted.reason:
    yield "accountant_reason is not the one that is found when recomputed"
  # Far below any tolerance on probabilities, so compared by its own size.
  if not math.isclose(record["tail_delta"], accounted.tail_delta, rel_tol=TOLERANCE, abs_tol=0.0):
    yield f"tail_delta is {record['tail_delta']}, but {accounted.tail_delta} when recomputed"


def _ledger(record: Mapping[str, Any]) -> Iterator[str]:
  ledger = Ledger.from_list(record["releases"])
  derived = ledger_check.total_epsilon(ledger, record["epsilon"], record["delta"])
  if not _same(record["ledger"]["epsilon"], derived):
    yield f"ledger.epsilon is {record['ledger']['epsilon']}, but {derived} when recomputed"
  yield from ledger_check.budget_problems(ledger, record["unit"])


def _cross(mechanism: Mechanism, record: Mapping[str, Any]) -> Iterator[str]:
  derived = crosscheck.cross_check(mechanism, record["delta"])
  for name, value in derived.items():
    stated = record["cross_check"][name]
    if (stated is None) != (value is None) or (value is not None and not _same(stated, value)):
      yield f"cross_check.{name} is {stated}, but {value} when recomputed"
  low, high = derived["optimistic_pld_epsilon"], derived["rdp_epsilon"]
  slack = TOLERANCE * max(1.0, record["epsilon"])
  if low is not None and record["epsilon"] < low - slack:
    yield f"epsilon is {record['epsilon']}, below the lower bound {low}"
  if high is not None and record["epsilon"] > high + slack:
    yield f"epsilon is {record['epsilon']}, above the Renyi bound {high}"


def _attacker(mechanism: Mechanism, record: Mapping[str, Any]) -> Iterator[str]:
  derived = attacker.attacker_section(mechanism, record["epsilon"], record["delta"])
  stated = record["attacker"]
  for name in ("membership_advantage_bound", "mechanism_advantage_bound"):
    if not math.isclose(stated[name], derived[name], rel_tol=TOLERANCE, abs_tol=1e-9):
      yield f"attacker.{name} is {stated[name]}, but {derived[name]} when recomputed"
  if len(stated["trade_off"]) != len(derived["trade_off"]):
    yield "attacker.trade_off has another number of points than it should"
    return
  for i, (point, wanted) in enumerate(zip(stated["trade_off"], derived["trade_off"], strict=True)):
    if point["false_positive_rate"] != wanted["false_positive_rate"]:
      yield f"attacker.trade_off[{i}] is at another false positive rate than it should be"
    name = "true_positive_rate_bound"
    if not math.isclose(point[name], wanted[name], rel_tol=TOLERANCE, abs_tol=1e-9):
      yield f"attacker.trade_off[{i}].{name} is {point[name]}, but {wanted[name]} when recomputed"


def _same(stated: float, derived: float) -> bool:
  return abs(stated - derived) <= TOLERANCE * max(1.0, abs(derived))
