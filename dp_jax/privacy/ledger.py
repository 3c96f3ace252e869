"""The ledger: every release on some data, entered before it is made.

A run enters its whole planned budget before its first step, so that a run that is
killed, restarted or stopped early has already paid. Entries are chained by hashes:
with the head and the count kept elsewhere, a cut-off or rewritten file shows. That is
evidence of tampering, not a protection against it.
"""

import contextlib
import copy
import fcntl
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO

from dp_jax.errors import UserError
from dp_jax.privacy import tuning
from dp_jax.privacy.accounting import accountants, composition
from dp_jax.privacy.ledger_entries import (
  GENESIS,
  Entry,
  FinishedElsewhereError,
  budget_fields,
  check_unfinished,
  check_unit,
  checked,
  entry_hash,
  finished,
  release_of,
  stored_budget,
  unit_of,
)
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.privacy.tuning import Selection

# Lets a run spend the last of a budget that it was calibrated to.
_ROUNDING = 1e-9


__all__ = ["BudgetError", "Entry", "FinishedElsewhereError", "Ledger", "entry_hash"]


class BudgetError(UserError):
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
    ledger._entries = checked(copy.deepcopy(list(entries)), "the list")
    ledger._budget = stored_budget(ledger._entries)
    return ledger

  @property
  def head(self) -> str:
    """The hash of the last entry, 64 hexadecimal digits; zeros if there is none."""
    return self._entries[-1]["hash"] if self._entries else GENESIS

  @property
  def count(self) -> int:
    """The number of entries."""
    return len(self._entries)

  @property
  def budget(self) -> PrivacySpec | None:
    """What all releases together may spend, if that was fixed."""
    return self._budget

  @property
  def units(self) -> tuple[str | None, ...]:
    """What each of `releases` protects; None where an earlier version did not say."""
    found = (each for each in self._entries if each["kind"] == "release")
    return tuple(unit_of(each, self._budget) for each in found)

  @property
  def releases(self) -> tuple[composition.PlannedRelease, ...]:
    """What has been reserved, whole."""
    return tuple(release_of(each) for each in self._entries if each["kind"] == "release")

  def of_runs(self, runs: Collection[str]) -> list[composition.PlannedRelease]:
    """What these runs have reserved."""
    entered = (each for each in self._entries if each["kind"] == "release")
    return [release_of(each) for each in entered if each["run"] in runs]

  def to_list(self) -> list[Entry]:
    """Returns copies of the entries, as JSON values."""
    return copy.deepcopy(self._entries)

  def reserve(
    self,
    mechanism: Mechanism,
    purpose: str,
    *,
    unit: str,
    run: str | None = None,
    selection: Selection | None = None,
  ) -> Entry:
    """Enters a release, all of its planned steps, before it is made.

    Args:
      mechanism: what will release.
      purpose: "training", "evaluation", "tuning", "solver" or another word for it.
      unit: what one guarantee protects, as `PrivacySpec.unit` names it. Noise for each record says
        little about a person of many, so all entries of a ledger have one unit.
      run: names the run, so that a resumed one does not pay twice: if its entry for
        this purpose is there and equal, that is returned.
      selection: set if the best of a random number of runs is released.

    Returns:
      A copy of the entry. When this returns, it is on the disk.

    Raises:
      BudgetError: if the budget would be overdrawn; nothing is entered then.
      ValueError: if the same run reserved something else, unit or adjacency differ from those of
        the other entries, or the file is damaged.
    """
    return self.reserve_all({purpose: mechanism}, unit=unit, run=run, selection=selection)[0]

  def reserve_all(
    self,
    mechanisms: Mapping[str, Mechanism],
    *,
    unit: str,
    run: str | None = None,
    selection: Selection | None = None,
  ) -> list[Entry]:
    """Enters several releases, by purpose, all of them or none; otherwise like `reserve`."""
    if not isinstance(unit, str) or not unit:
      raise UserError(f"unit is {unit!r}; say what is protected, 'record' or the column of people")
    contents = []
    for purpose, mechanism in mechanisms.items():
      if not isinstance(purpose, str) or not purpose:
        raise UserError(f"purpose is {purpose!r}; say what is released, such as 'training'")
      if selection is not None:
        tuning.check(mechanism)
      contents.append(
        {
          "kind": "release",
          "purpose": purpose,
          "unit": unit,
          "run": run,
          "mechanism": mechanism.to_dict(),
          "selection": None if selection is None else selection.to_dict(),
        }
      )
    with self._current() as file:
      return self._reserve(contents, file)

  def finish(self, run: str, token: str) -> None:
    """Notes that a run is about to release what it reserved, once.

    Copies of a run's folder have its key and its reservation, but make releases of their own: the
    first that comes here is the one that was paid for.

    Args:
      run: as it reserved.
      token: of the folder that finishes, drawn by it and kept there; the same one may come again.

    Raises:
      FinishedElsewhereError: if another token finished this run.
      ValueError: if the run has reserved nothing, or the file is damaged.
    """
    with self._current() as file:
      check_unfinished(self._entries, run, token)
      if not self.has(run):
        raise UserError(f"run {run!r} has reserved nothing in this ledger")
      if finished(self._entries, run) is None:
        self._append({"kind": "finished", "run": run, "token": token}, file)

  def check_unfinished(self, run: str, token: str | None) -> None:
    """Refuses a run that was finished under another token than this one.

    Raises:
      FinishedElsewhereError: if it was.
    """
    check_unfinished(self._entries, run, token)

  def has(self, run: str) -> bool:
    """Whether a run has reserved anything."""
    return any(each["kind"] == "release" and each["run"] == run for each in self._entries)

  def account(self, delta: float, step: int | None = None) -> accountants.Accounted:
    """Returns the epsilon of everything that was reserved.

    Args:
      delta: in (0, 1).
      step: if given, the newest reservation counts only this many steps: what has been
        spent so far, for a progress bar. What a run states is the whole reservation.
    """
    releases = list(self.releases)
    if step is not None and releases:
      newest = releases[-1]
      releases[-1] = composition.PlannedRelease(newest.mechanism, step, newest.selection)
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
      raise UserError(f"the ledger has {self.count} entries, but had {count}: it was cut off")
    found = self._entries[count - 1]["hash"] if count else GENESIS
    if found != head:
      raise UserError(f"entry {count} of the ledger has hash {found}, not {head}: it was rewritten")

  def _reserve(self, contents: Sequence[Entry], file: IO[str] | None) -> list[Entry]:
    entered = [self._entered(content) for content in contents]
    new = [content for content, entry in zip(contents, entered, strict=True) if entry is None]
    if new:
      check_unit(contents[0]["unit"], self._entries, self._budget)
      self._check_budget([*self.releases, *map(release_of, new)], len(new))
      if not self._entries and self._budget is not None:
        self._append({"kind": "budget", **budget_fields(self._budget)}, file)
    return [
      self._append(content, file) if entry is None else copy.deepcopy(entry)
      for content, entry in zip(contents, entered, strict=True)
    ]

  def _entered(self, content: Entry) -> Entry | None:
    """The entry that the same run has made for the same purpose, or None."""
    for entry in self._entries:
      if entry["kind"] != "release":
        continue
      same = content["run"] is not None and entry.get("run") == content["run"]
      if same and entry["purpose"] == content["purpose"]:
        # An entry of an earlier version does not say its unit.
        if all(entry.get(key, value) == value for key, value in content.items()):
          return entry
        raise UserError(
          f"run {content['run']!r} has already reserved another mechanism for"
          f" {content['purpose']}; start a new run"
        )
    return None

  def _check_budget(self, releases: list[composition.PlannedRelease], new: int) -> None:
    adjacencies = {each.mechanism.adjacency for each in releases}
    budget = self._budget
    if budget is not None:
      adjacencies.add(budget.adjacency)
    if len(adjacencies) > 1:
      raise UserError(
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
  def _current(self) -> Iterator[IO[str] | None]:
    """Holds the file, whose entries are now those of this ledger; None for one in memory."""
    if self.path is None:
      yield None
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self._locked() as file:
      self._load(file)
      yield file

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
      raise UserError(f"ledger {self.path} ends inside an entry; remove its unfinished last line")
    try:
      entries = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError as error:
      raise UserError(f"ledger {self.path} is not one JSON entry a line ({error})") from error
    entries = checked(entries, f"ledger {self.path}")
    before, self._entries = self._entries, entries
    if before:
      self.check(before[-1]["hash"], len(before))
    stored = stored_budget(entries)
    if stored is not None:
      if self._budget is not None and budget_fields(self._budget) != budget_fields(stored):
        raise UserError(
          f"ledger {self.path} has the budget {budget_fields(stored)}; give that one or none"
        )
      self._budget = stored
    elif entries and self._budget is not None:
      raise UserError(f"ledger {self.path} was made without a budget; give none, or a new file")
