"""Where a run begins: at step 0 with a fresh key, or at its latest checkpoint."""

import logging
from collections.abc import Callable

from dp_jax.errors import UserError
from dp_jax.parallel.hosts import broadcast, is_process_0, on_process_0
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training.checkpoints.checkpoint import Checkpoints, Restored
from dp_jax.training.checkpoints.run_key import environment
from dp_jax.training.checkpoints.workdir import WorkDir, cut_log
from dp_jax.training.setup.prepare import Run
from dp_jax.training.step import init_state

_log = logging.getLogger(__name__)


def begin(
  run: Run,
  folder: WorkDir,
  checkpoints: Checkpoints,
  new_key: Callable[[], MasterKey],
  reserve: Callable[[str], Ledger],
) -> tuple[Restored, Ledger | None]:
  """Restores or makes the state, and reserves the budget.

  The key is on disk before the budget is reserved, and both before step 0: a restart at any moment
  draws the same noise and pays once.

  Args:
    run: what was prepared.
    folder: its work directory, held open.
    checkpoints: of this run.
    new_key: draws the key of a run that starts.
    reserve: enters the budget of the run that a digest of its key names; does nothing where it is
      entered already.

  Raises:
    ValueError: if the checkpoints are of another run, or are gone while the run has released or
      reserved something, or the budget does not allow the run.
  """
  state = init_state(run.params, run.optimizer, run.mesh, run.step_noise)
  if checkpoints.latest() is not None:
    begun = checkpoints.restore(state)
    done = int(begun.state.step)
    if begun.key is None and done < run.mechanism.steps:
      raise UserError(f"the keys of this run are gone at step {done}; use a new workdir.")
    _log.info("resuming after step %d", done)
    if is_process_0() and done < run.mechanism.steps and begun.environment != environment():
      _log.warning("warning: %s", _elsewhere(begun.environment, environment()))
    ledger = on_process_0(lambda: reserve(begun.key_digest))
  else:
    if broadcast(folder.release.exists() or folder.ledger.exists()):
      raise UserError(
        f"the checkpoints in {str(folder.checkpoints)!r} are gone, but the run has begun: another"
        " pass over the data would release more than its statement says. Use a new workdir."
      )
    key = new_key()
    begun = Restored(state, key, key.digest(), key.is_test, environment())
    checkpoints.save(0, state, key)
    checkpoints.wait()
    ledger = _reserve_or_discard(reserve, key.digest(), checkpoints)
  step = int(begun.state.step)

  def cut_logs() -> None:
    for log in (*folder.training_logs(), folder.metrics_log(run.config.data.declared)):
      cut_log(log, step)

  on_process_0(cut_logs)
  return begun, ledger


def _elsewhere(there: str, here: str) -> str:
  """What to say where the software or hardware has changed."""
  before, now = there.split(", "), here.split(", ")
  old = ", ".join(each for each in before if each not in now) or "more"
  new = ", ".join(each for each in now if each not in before) or "less"
  return (
    f"the checkpoint was made by other software or hardware ({old}) than goes on from it ({new}):"
    " steps that are repeated have fresh noise, and the rest is as this software computes it"
  )


def _reserve_or_discard(
  reserve: Callable[[str], Ledger], key_digest: str, checkpoints: Checkpoints
) -> Ledger | None:
  try:
    return on_process_0(lambda: reserve(key_digest))
  except ValueError:
    checkpoints.discard()
    raise
