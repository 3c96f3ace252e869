"""Entries of a ledger as JSON values: their hashes, what they may be, and what they stand for."""

import hashlib
import json
from typing import Any

from dp_jax.errors import UserError
from dp_jax.privacy.accounting import composition
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.privacy.tuning import Selection

Entry = dict[str, Any]

GENESIS = "0" * 64
_BUDGET_FIELDS = ("epsilon", "delta", "unit", "adjacency")


class FinishedElsewhereError(UserError):
  """Another copy of a run's folder has finished it already."""


def entry_hash(entry: Entry) -> str:
  """Returns the SHA-256 of an entry's canonical JSON, its own "hash" left out."""
  content = {key: value for key, value in entry.items() if key != "hash"}
  text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def checked(entries: list[Entry], what: str) -> list[Entry]:
  previous = GENESIS
  for index, entry in enumerate(entries):
    if not isinstance(entry, dict) or entry.get("index") != index:
      raise UserError(f"{what}: entry {index} is missing or out of order")
    if entry.get("previous") != previous or entry.get("hash") != entry_hash(entry):
      raise UserError(f"{what}: entry {index} does not match its hash; it was changed")
    kind = entry.get("kind")
    if kind == "finished":
      _check_finished(entries[:index], entry, f"{what}: entry {index}")
    elif kind != "release" and not (index == 0 and kind == "budget"):
      raise UserError(f"{what}: entry {index} is neither a release nor a first entry's budget")
    previous = entry["hash"]
  return entries


def release_of(entry: Entry) -> composition.PlannedRelease:
  selection = entry["selection"]
  return composition.PlannedRelease(
    Mechanism.from_dict(entry["mechanism"]),
    None,
    None if selection is None else Selection.from_dict(selection),
  )


def stored_budget(entries: list[Entry]) -> PrivacySpec | None:
  if not entries or entries[0]["kind"] != "budget":
    return None
  return PrivacySpec(**{key: entries[0][key] for key in _BUDGET_FIELDS})


def budget_fields(spec: PrivacySpec) -> dict[str, Any]:
  return {key: getattr(spec, key) for key in _BUDGET_FIELDS}


def unit_of(entry: Entry, budget: PrivacySpec | None) -> str | None:
  """What one guarantee of a release protects.

  Entries of earlier versions do not say: the budget of their ledger does, or nothing.
  """
  unit = entry.get("unit")
  return unit if unit is not None or budget is None else budget.unit


def _check_finished(before: list[Entry], entry: Entry, what: str) -> None:
  runs = [each["run"] for each in before if each["kind"] == "release"]
  ended = [each["run"] for each in before if each["kind"] == "finished"]
  if entry.get("run") is None or entry["run"] not in runs or entry["run"] in ended:
    raise UserError(f"{what} does not finish one run that was entered before it")


def check_unit(unit: str, entries: list[Entry], budget: PrivacySpec | None) -> None:
  """All releases, and the budget, are about one unit: else they have no common guarantee.

  Raises:
    ValueError: if that of a new release is another one, or entries do not say theirs.
  """
  units = {unit_of(each, budget) for each in entries if each["kind"] == "release"}
  if budget is not None:
    units.add(budget.unit)
  if None in units:
    raise UserError(
      "the ledger has entries of an earlier version, which do not say whether they protect a record"
      " or a person: nothing can be added to them. Start a new ledger file, and add what this one"
      " spent by hand"
    )
  others = sorted(each for each in units - {unit} if each is not None)
  if others:
    raise UserError(
      f"the ledger is of releases for each {', '.join(map(repr, others))}, and this one would be"
      f" for each {unit!r}: they have no common guarantee. Use one privacy.unit, or another ledger"
    )


def finished(entries: list[Entry], run: str) -> Entry | None:
  """The entry with which a run was finished, if it was."""
  return next((e for e in entries if e["kind"] == "finished" and e["run"] == run), None)


def check_unfinished(entries: list[Entry], run: str, token: str | None) -> None:
  """Refuses a run that was finished under another token than this one.

  Raises:
    FinishedElsewhereError: if it was.
  """
  found = finished(entries, run)
  if found is not None and found["token"] != token:
    raise FinishedElsewhereError(
      "another copy of this run has been finished with this ledger: a second release would not be"
      " in its books. Delete this copy (its checkpoints may hold the key with which the noise of"
      " that release could be taken away), and start a new run in a new workdir"
    )
