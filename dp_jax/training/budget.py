"""The ledger of a run: its own, or one that several runs on the same data share."""

import json
from pathlib import Path

from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.report.atomic import write_text
from dp_jax.training.prepare import Run
from dp_jax.training.workdir import WorkDir


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
    ValueError: if the budget would be overdrawn, or the run was begun with another ledger or
      another key.
  """
  if run.privacy is None:
    return Ledger()
  if shared is None and budget is not None:
    raise ValueError("a budget needs a ledger that keeps it: give --ledger=FILE.")
  ledger = Ledger(shared or folder.ledger, budget)
  identity = _identity(folder, key_digest, shared, ledger)
  ledger.reserve_all(run.releases, run=identity)
  return ledger


def _identity(folder: WorkDir, key_digest: str, shared: Path | None, ledger: Ledger) -> str:
  """The name under which this run reserves: the digest of its key, so that each key is paid for."""
  where = None if shared is None else str(shared.absolute())
  if folder.ledger_identity.exists():
    there = json.loads(folder.ledger_identity.read_text())
    if there["ledger"] != where:
      raise ValueError(
        f"this run reserved its budget in {there['ledger'] or 'its own ledger'}, not in"
        f" {where or 'its own'}: give the same --ledger to go on."
      )
    begun = any(entry.get("run") == there["run"] for entry in ledger.to_list())
    if begun and there["run"] != key_digest:
      raise ValueError(
        f"this run has reserved its budget in {str(shared)!r} with a key that is gone: another pass"
        " over the data would release more than was paid for. Use a new workdir."
      )
    if begun:
      return key_digest
  write_text(folder.ledger_identity, json.dumps({"ledger": where, "run": key_digest}) + "\n")
  return key_digest
