"""The ledger of a run: its own, or one that several runs on the same data share."""

import json
import secrets
from pathlib import Path
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files.atomic import write_text
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.prepare import Run


def reserve(
  run: Run, folder: WorkDir, key_digest: str, shared: Path | None, budget: PrivacySpec | None
) -> Ledger:
  """Enters the whole planned budget of a run before its first step.

  A run that is killed, resumed or stopped early has spent it once, whole.

  Args:
    run: what was prepared.
    folder: its work directory, held open.
    key_digest: of the master key; it names the run.
    shared: the file of `--ledger`, or None for a ledger of this run alone.
    budget: what all runs of a new shared ledger may spend together.

  Returns:
    The ledger; that of a run without privacy is empty.

  Raises:
    ValueError: if the budget would be overdrawn, the run was begun with another ledger or another
      key, or another copy of the folder has finished it. The folder is then as it was.
  """
  if run.privacy is None:
    return Ledger()
  if shared is None and budget is not None:
    raise UserError("a budget needs a ledger that keeps it: give --ledger=FILE.")
  ledger = Ledger(shared or folder.ledger, budget)
  there = _noted(folder)
  _check_identity(there, key_digest, shared, folder, ledger)
  ledger.check_unfinished(key_digest, there.get("token"))
  where = None if shared is None else str(shared.absolute())
  # On disk before the reservation: who draws another key for the same folder must see this one.
  _note(folder, {**there, "ledger": where, "run": key_digest})
  try:
    ledger.reserve_all(run.releases, unit=run.privacy.unit, run=key_digest)
  except ValueError:
    _restore(folder, there)
    raise
  except OSError:
    if not _may_hold(ledger, key_digest):
      _restore(folder, there)
    raise
  return ledger


def finish(folder: WorkDir, ledger: Ledger | None, shared: Path | None) -> None:
  """Notes in a shared ledger that this folder makes the release that was reserved, once.

  A copied folder has the same key and the same reservation. Of several copies the first to come
  here is the one that was paid for. The ledger of a run alone is copied with its folder: two such
  copies have two books, and nothing here can see it.

  Raises:
    FinishedElsewhereError: if another copy was first.
  """
  if ledger is None or shared is None or not ledger.count:
    return
  there = _noted(folder)
  if "token" not in there:
    there["token"] = secrets.token_hex(16)
    _note(folder, there)  # first, so that whoever is killed now is known by it
  ledger.finish(there["run"], there["token"])


def _restore(folder: WorkDir, there: dict[str, Any]) -> None:
  """What the folder said before: or else it would claim to have reserved."""
  if there:
    _note(folder, there)
  else:
    folder.ledger_identity.unlink()


def _may_hold(ledger: Ledger, run: str) -> bool:
  """Whether a run may be in the file of a ledger, which could not be written."""
  try:
    return ledger.path is not None and ledger.path.exists() and Ledger(ledger.path).has(run)
  except (ValueError, OSError):
    return True


def _noted(folder: WorkDir) -> dict[str, Any]:
  """What the folder says of its reservation; empty if it has made none."""
  path = folder.ledger_identity
  return dict(json.loads(path.read_text())) if path.exists() else {}


def _note(folder: WorkDir, content: dict[str, Any]) -> None:
  write_text(folder.ledger_identity, json.dumps(content) + "\n")


def _check_identity(
  there: dict[str, Any], key_digest: str, shared: Path | None, folder: WorkDir, ledger: Ledger
) -> None:
  """Refuses another ledger than the one that the run reserved in, wherever that file lies now."""
  if not there:
    return
  if ledger.has(there["run"]):
    if there["run"] != key_digest:
      raise UserError(
        f"this run has reserved its budget in {str(ledger.path)!r} with a key that is gone: another"
        " pass over the data would release more than was paid for. Use a new workdir."
      )
    return
  before = folder.ledger if there["ledger"] is None else Path(there["ledger"])
  if before == (shared.absolute() if shared is not None else folder.ledger):
    return  # it was killed before the reservation
  # One that is not where it was may hold the run, so it does not count as empty.
  if not before.exists() or Ledger(before).has(there["run"]):
    named = "its own ledger" if there["ledger"] is None else repr(there["ledger"])
    raise UserError(
      f"this run reserved its budget in {named}, not in {str(ledger.path)!r}: give the same"
      " --ledger to go on, wherever that file is now."
    )
