"""The ledger inside privacy.json: an unbroken chain, with the mechanism that ran in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dp_jax.errors import UserError
from dp_jax.privacy import shares
from dp_jax.privacy.accounting.accountants import Accounted
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.mechanism import Mechanism

Parts = Mapping[str, Mechanism]


def account_run(mechanism: Mechanism, parts: Parts, delta: float) -> Accounted:
  """What a run spent: its mechanism, or all of its parts where it has several."""
  return shares.account(tuple(parts.values()), delta) if parts else mechanism.account(delta)


def parts_section(parts: Parts) -> list[dict[str, Any]]:
  """The `parts` field of privacy.json."""
  return [{"purpose": purpose, "mechanism": each.to_dict()} for purpose, each in parts.items()]


def parts_of(record: Mapping[str, Any]) -> dict[str, Mechanism]:
  """The parts of a record, by purpose; empty where it has one mechanism.

  Raises:
    ValueError: if one is no mechanism, or a purpose repeats.
  """
  found = {
    each["purpose"]: Mechanism.from_dict(each["mechanism"]) for each in record.get("parts", ())
  }
  if len(found) != len(record.get("parts", ())):
    raise UserError("a purpose repeats")
  return found


def ledger_section(
  mechanism: Mechanism,
  parts: Parts,
  entries: Sequence[Mapping[str, Any]],
  epsilon: float,
  delta: float,
) -> dict[str, Any]:
  """The `ledger` field of privacy.json: head, count, and the epsilon of all releases together.

  Args:
    mechanism: the one that ran.
    parts: those that it stands for, by purpose, if any.
    entries: what `Ledger.to_list()` returned.
    epsilon: of the mechanism alone.
    delta: the stated one.

  Raises:
    ValueError: if the chain is broken or the mechanism was not entered.
  """
  ledger = Ledger.from_list([dict(entry) for entry in entries])
  if not _holds(ledger, mechanism, parts):
    raise UserError("the ledger does not hold the mechanism; reserve it before the first step")
  return {
    "head": ledger.head,
    "count": ledger.count,
    "releases": len(ledger.releases),
    "epsilon": total_epsilon(ledger, epsilon, delta),
  }


def total_epsilon(ledger: Ledger, epsilon: float, delta: float) -> float:
  """The epsilon of everything in the ledger, which is `epsilon` if it holds one release."""
  plain = all(release.selection is None for release in ledger.releases)
  return epsilon if plain and len(ledger.releases) == 1 else ledger.epsilon(delta)


def problems(mechanism: Mechanism, record: Mapping[str, Any]) -> Iterator[str]:
  """What is wrong with the ledger of a record, one line each."""
  stated = record["ledger"]
  try:
    ledger = Ledger.from_list(record["releases"])
    if not _holds(ledger, mechanism, parts_of(record)):
      yield "releases: no entry is a release of the mechanism that the record describes"
  except (ValueError, TypeError, KeyError) as error:
    yield f"releases: {error}"
    return
  yield from _unit_problems(ledger, record["unit"])
  if stated["head"] != ledger.head:
    yield f"ledger.head is {stated['head']}, but {ledger.head} in the chain"
  if stated["count"] != ledger.count:
    yield f"ledger.count is {stated['count']}, but {ledger.count} in the chain"
  if stated["releases"] != len(ledger.releases):
    yield f"ledger.releases is {stated['releases']}, but {len(ledger.releases)} in the chain"


def budget_problems(ledger: Ledger, unit: str) -> Iterator[str]:
  """Whether the releases stay within the budget that the ledger was made with, if it has one.

  Args:
    ledger: of the record.
    unit: what the record says is protected; a budget for another unit says nothing about it.

  Raises:
    ValueError: if the releases cannot be accounted together.
  """
  budget = ledger.budget
  if budget is None:
    return
  if budget.unit != unit:
    yield f"releases: the ledger's budget is for each {budget.unit!r}, the record for each {unit!r}"
  adjacencies = {release.mechanism.adjacency for release in ledger.releases}
  if adjacencies != {budget.adjacency}:
    yield f"releases: the ledger's budget is for adjacency {budget.adjacency}"
  spent = ledger.epsilon(budget.delta)
  if not ledger.within_budget(spent):
    yield f"releases: they spend epsilon {spent}, over the ledger's budget of {budget.epsilon}"


def _unit_problems(ledger: Ledger, unit: str) -> Iterator[str]:
  """Whether all releases protect what the record says: else what they spend does not add up."""
  for index, each in enumerate(ledger.units):
    if each is None:
      yield f"releases: release {index} does not say what it protects"
    elif each != unit:
      yield f"releases: release {index} is for each {each!r}, the record for each {unit!r}"


def _holds(ledger: Ledger, mechanism: Mechanism, parts: Parts) -> bool:
  """Whether the ledger has an entry of its own for each mechanism that ran.

  That of a part has its purpose too: the statement says what was released by it.
  """
  entered = [each for each in ledger.to_list() if each["kind"] == "release"]
  left = [
    (each["purpose"] if parts else None, release.mechanism)
    for each, release in zip(entered, ledger.releases, strict=True)
    if release.selection is None
  ]
  wanted: list[tuple[str | None, Mechanism]] = [*parts.items()] or [(None, mechanism)]
  for each in wanted:
    if each not in left:
      return False
    left.remove(each)
  return True
