"""Evaluation of a run on its held-out records, during it and when it completes."""

import logging
from typing import Any

import jax

from dp_jax.parallel.hosts import on_process_0
from dp_jax.parallel.mesh import place, shared_predict, to_host
from dp_jax.tasks.evaluate import HeldOut, evaluate
from dp_jax.training.checkpoints.checkpoint import Checkpoints
from dp_jax.training.checkpoints.workdir import WorkDir, append_line
from dp_jax.training.held_out import keep_step
from dp_jax.training.setup.prepare import Run
from dp_jax.training.step import TrainState
from dp_jax.training.tensorboard import Board

_log = logging.getLogger(__name__)


class Evaluation:
  """Evaluates each so many steps, and offers what it saw to the keeper of the best checkpoint.

  What is released is evaluated when the run completes; here the last step is only where a best
  checkpoint is kept.

  Args:
    run: what was prepared.
    workdir: where the results go.
    checkpoints: of this run.
    board: where the results are plotted.
  """

  def __init__(
    self, run: Run, workdir: WorkDir, checkpoints: Checkpoints, board: Board | None = None
  ):
    self._run, self._workdir, self._checkpoints, self._board = run, workdir, checkpoints, board

  def after_step(self, step: int, state: TrainState) -> None:
    """Evaluates if it is time."""
    config, last = self._run.config, step == self._run.mechanism.steps
    wanted = config.checkpoint.best_metric is not None
    if not (last and wanted) and (last or not config.eval.every or step % config.eval.every):
      return
    if wanted or jax.process_count() > 1:
      self._evaluate(step, state, wanted)
      return
    try:
      self._evaluate(step, state, wanted)
    except OSError:  # a full disk stops everything, and is told
      raise
    except Exception as error:  # the release depends on nothing that is measured here
      public = config.data.declared == "public"
      what = f"{type(error).__name__}: {error}" if public else type(error).__name__
      _log.warning("warning: no evaluation after step %d (%s); training goes on", step, what)

  def _evaluate(self, step: int, state: TrainState, wanted: bool) -> None:
    held_out = evaluate_state(self._run, state)
    metrics = held_out.scalars()
    if wanted:
      self._checkpoints.save_if_best(step, state, metrics)
    log_metrics(self._run, self._workdir, step, metrics)
    if self._board is not None:
      self._board.scalars(step, "eval", metrics)
    if self._run.privacy is None:
      whole = state._replace(average=to_host(state.average))
      on_process_0(lambda: keep_step(self._run, self._workdir, step, whole, held_out.table))

  def close(self) -> None:
    """Nothing is held."""


def evaluate_state(run: Run, state: TrainState) -> HeldOut:
  """Evaluates the moving average on the evaluation split."""
  arrays = {**state.average, **place(run.frozen, run.mesh)}
  return evaluate(
    shared_predict(run.released.evaluated, arrays, run.mesh),
    run.eval_loader,
    run.task.task,
    run.config.eval.microbatch_size,
  )


def log_metrics(
  run: Run, workdir: WorkDir, step: int, metrics: dict[str, Any], *, final: bool = False
) -> None:
  """Appends an evaluation to the log that the declared data allows."""
  data = run.config.data
  entry = {"step": step, "split": data.eval_split, "metrics": metrics}
  append_line(workdir.metrics_log(data.declared), {**entry, **({"final": True} if final else {})})
