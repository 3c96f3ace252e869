"""The ledger: every release on some data, entered before it is made.

A run enters its whole planned budget before its first step, so that a run that is
killed, restarted or stopped early has already paid. Entries are chained by hashes:
with the head and the count kept elsewhere, a cut-off or rewritten file shows. That is
evidence of tampering, not a protection against it.
"""

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from dp_jax.privacy import accounting, composition, tuning
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.privacy.tuning import Selection

Entry = dict[str, Any]

_GENESIS = "0" * 64
_BUDGET_FIELDS = ("epsilon", "delta", "unit", "adjacency")
# Lets a run spend the last of a budget that it was calibrated to.
_ROUNDING = 1e-9


class BudgetError(ValueError):
  """A reservation would spend more than the ledger's budget."""


class Ledger:
  """Releases in order, in memory or in a file that several runs share.

  Attributes:
    path: the file, one JSON entry a line; None for a ledger in memory.
  """

  def __init__(self, path: str | os.PathLike[str] | None = None, budget: PrivacySpec | None = None):
    """Opens a ledger.

    Args:
      path: the file; made by the first reservation if it does not exist.
      budget: what all runs together may spend. A file keeps the budget that it was
        made with; giving another one is an error.

    Raises:
      ValueError: if the file is damaged, or has another budget.
    """
    self.path = None if path is None else pathlib.Path(path)
    self._budget = budget
    self._entries: list[Entry] = []
    if self.path is not None and self.path.exists():
      with self._locked() as file:
        self._load(file)

  @classmethod
  def from_list(cls, entries: Sequence[Entry]) -> "Ledger":
    """Builds a ledger in memory from what `to_list` returned, checking its chain."""
    ledger = cls()
    ledger._entries = _checked(copy.deepcopy(list(entries)), "the list")
    ledger._budget = _stored_budget(ledger._entries)
    return ledger

  @property
  def head(self) -> str:
    """The hash of the last entry, 64 hexadecimal digits; zeros if there is none."""
    return self._entries[-1]["hash"] if self._entries else _GENESIS

  @property
  def count(self) -> int:
    """The number of entries."""
    return len(self._entries)

  @property
  def budget(self) -> PrivacySpec | None:
    """What all releases together may spend, if that was fixed."""
    return self._budget

  @property
  def releases(self) -> tuple[composition.Release, ...]:
    """What has been reserved, whole."""
    return tuple(_release(each) for each in self._entries if each["kind"] == "release")

  def to_list(self) -> list[Entry]:
    """Returns copies of the entries, as JSON values."""
    return copy.deepcopy(self._entries)

  def reserve(
    self,
    mechanism: Mechanism,
    purpose: str,
    *,
    run: str | None = None,
    selection: Selection | None = None,
  ) -> Entry:
    """Enters a release, all of its planned steps, before it is made.

    Args:
      mechanism: what will release.
      purpose: "training", "evaluation", "tuning", "solver" or another word for it.
      run: names the run, so that a resumed one does not pay twice: if its entry for
        this purpose is there and equal, that is returned.
      selection: set if the best of a random number of runs is released.

    Returns:
      A copy of the entry. When this returns, it is on the disk.

    Raises:
      BudgetError: if the budget would be overdrawn; nothing is entered then.
      ValueError: if the same run reserved something else, the adjacency differs from
        that of the other entries, or the file is damaged.
    """
    return self.reserve_all({purpose: mechanism}, run=run, selection=selection)[0]

  def reserve_all(
    self,
    mechanisms: Mapping[str, Mechanism],
    *,
    run: str | None = None,
    selection: Selection | None = None,
  ) -> list[Entry]:
    """Enters several releases, by purpose, all of them or none; otherwise like `reserve`."""
    contents = []
    for purpose, mechanism in mechanisms.items():
      if not isinstance(purpose, str) or not purpose:
        raise ValueError(f"purpose is {purpose!r}; say what is released, such as 'training'")
      if selection is not None:
        tuning.check(mechanism)
      contents.append(
        {
          "kind": "release",
          "purpose": purpose,
          "run": run,
          "mechanism": mechanism.to_dict(),
          "selection": None if selection is None else selection.to_dict(),
        }
      )
    if self.path is None:
      return self._reserve(contents, None)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self._locked() as file:
      self._load(file)
      return self._reserve(contents, file)

  def account(self, delta: float, step: int | None = None) -> accounting.Accounted:
    """Returns the epsilon of everything that was reserved.

    Args:
      delta: in (0, 1).
      step: if given, the newest reservation counts only this many steps: what has been
        spent so far, for a progress bar. What a run states is the whole reservation.
    """
    releases = list(self.releases)
    if step is not None and releases:
      newest = releases[-1]
      releases[-1] = composition.Release(newest.mechanism, step, newest.selection)
    return composition.account_releases(releases, delta)

  def epsilon(self, delta: float, step: int | None = None) -> float:
    """Returns `account(delta, step).epsilon`."""
    return self.account(delta, step).epsilon

  def within_budget(self, epsilon: float) -> bool:
    """Whether `epsilon`, at the budget's delta, is no more than the budget; True without one."""
    return self._budget is None or epsilon <= self._budget.epsilon * (1 + _ROUNDING)

  def check(self, head: str, count: int) -> None:
    """Checks that the ledger still holds what was there when head and count were noted.

    Raises:
      ValueError: if entries were cut off or rewritten since.
    """
    if count > self.count:
      raise ValueError(f"the ledger has {self.count} entries, but had {count}: it was cut off")
    found = self._entries[count - 1]["hash"] if count else _GENESIS
    if found != head:
      raise ValueError(
        f"entry {count} of the ledger has hash {found}, not {head}: it was rewritten"
      )

  def _reserve(self, contents: Sequence[Entry], file: IO[str] | None) -> list[Entry]:
    entered = [self._entered(content) for content in contents]
    new = [content for content, entry in zip(contents, entered, strict=True) if entry is None]
    if new:
      self._check_budget([*self.releases, *map(_release, new)], len(new))
      if not self._entries and self._budget is not None:
        self._append({"kind": "budget", **_budget_fields(self._budget)}, file)
    return [
      self._append(content, file) if entry is None else copy.deepcopy(entry)
      for content, entry in zip(contents, entered, strict=True)
    ]

  def _entered(self, content: Entry) -> Entry | None:
    """The entry that the same run has made for the same purpose, or None."""
    for entry in self._entries:
      same = content["run"] is not None and entry.get("run") == content["run"]
      if same and entry["purpose"] == content["purpose"]:
        if all(entry[key] == value for key, value in content.items()):
          return entry
        raise ValueError(
          f"run {content['run']!r} has already reserved another mechanism for"
          f" {content['purpose']}; start a new run"
        )
    return None

  def _check_budget(self, releases: list[composition.Release], new: int) -> None:
    adjacencies = {each.mechanism.adjacency for each in releases}
    budget = self._budget
    if budget is not None:
      adjacencies.add(budget.adjacency)
    if len(adjacencies) > 1:
      raise ValueError(
        f"the ledger would mix adjacencies {', '.join(sorted(adjacencies))}, which have no common"
        " guarantee; use one"
      )
    if budget is None:
      return
    total = composition.account_releases(releases, budget.delta).epsilon
    if not self.within_budget(total):
      spent = composition.account_releases(releases[:-new], budget.delta).epsilon
      raise BudgetError(
        f"this run would bring the total to epsilon {total:.6g} at delta {budget.delta:g}, over the"
        f" ledger's budget of {budget.epsilon:g} ({spent:.6g} is spent); plan fewer steps or more"
        " noise"
      )

  def _append(self, content: Entry, file: IO[str] | None) -> Entry:
    entry = {"index": self.count, "previous": self.head, **content}
    entry["hash"] = entry_hash(entry)
    if file is not None:
      file.seek(0, os.SEEK_END)
      file.write(json.dumps(entry, sort_keys=True, allow_nan=False) + "\n")
      file.flush()
      os.fsync(file.fileno())
    self._entries.append(entry)
    return copy.deepcopy(entry)

  @contextlib.contextmanager
  def _locked(self) -> Iterator[IO[str]]:
    assert self.path is not None
    with open(self.path, "a+", encoding="utf-8") as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      try:
        yield file
      finally:
        fcntl.flock(file, fcntl.LOCK_UN)

  def _load(self, file: IO[str]) -> None:
    file.seek(0)
    text = file.read()
    if text and not text.endswith("\n"):
      raise ValueError(f"ledger {self.path} ends inside an entry; remove its unfinished last line")
    try:
      entries = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError as error:
      raise ValueError(f"ledger {self.path} is not one JSON entry a line ({error})") from error
    entries = _checked(entries, f"ledger {self.path}")
    before, self._entries = self._entries, entries
    if before:
      self.check(before[-1]["hash"], len(before))
    stored = _stored_budget(entries)
    if stored is not None:
      if self._budget is not None and _budget_fields(self._budget) != _budget_fields(stored):
        raise ValueError(
          f"ledger {self.path} has the budget {_budget_fields(stored)}; give that one or none"
        )
      self._budget = stored
    elif entries and self._budget is not None:
      raise ValueError(f"ledger {self.path} was made without a budget; give none, or a new file")


def entry_hash(entry: Entry) -> str:
  """Returns the SHA-256 of an entry's canonical JSON, its own "hash" left out."""
  content = {key: value for key, value in entry.items() if key != "hash"}
  text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _checked(entries: list[Entry], what: str) -> list[Entry]:
  previous = _GENESIS
  for index, entry in enumerate(entries):
    if not isinstance(entry, dict) or entry.get("index") != index:
      raise ValueError(f"{what}: entry {index} is missing or out of order")
    if entry.get("previous") != previous or entry.get("hash") != entry_hash(entry):
      raise ValueError(f"{what}: entry {index} does not match its hash; it was changed")
    if entry.get("kind") != "release" and not (index == 0 and entry.get("kind") == "budget"):
      raise ValueError(f"{what}: entry {index} is neither a release nor a first entry's budget")
    previous = entry["hash"]
  return entries


def _release(entry: Entry) -> composition.Release:
  selection = entry["selection"]
  return composition.Release(
    Mechanism.from_dict(entry["mechanism"]),
    None,
    None if selection is None else Selection.from_dict(selection),
  )


def _stored_budget(entries: list[Entry]) -> PrivacySpec | None:
  if not entries or entries[0]["kind"] != "budget":
    return None
  return PrivacySpec(**{key: entries[0][key] for key in _BUDGET_FIELDS})


def _budget_fields(spec: PrivacySpec) -> dict[str, Any]:
  return {key: getattr(spec, key) for key in _BUDGET_FIELDS}
