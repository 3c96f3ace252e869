"""`train`: one run from a configuration to what it leaves behind."""

import contextlib
import dataclasses
import errno
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.report.atomic import write_text
from dp_jax.report.html import render_report
from dp_jax.report.statement import PLAIN_STATEMENT, statement
from dp_jax.training.budget import reserve
from dp_jax.training.checkpoint import Checkpoints, delete_keys
from dp_jax.training.config import Config
from dp_jax.training.held_out import write_predictions
from dp_jax.training.keys import for_environment
from dp_jax.training.loop import evaluate_state, log_metrics, run_steps
from dp_jax.training.prepare import Run, environment, prepare
from dp_jax.training.release import complete_release, write_parameters
from dp_jax.training.solving import Solving, solve_state
from dp_jax.training.start import begin
from dp_jax.training.step import TrainState
from dp_jax.training.workdir import WorkDir

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Result:
  """What a completed run says of itself.

  Attributes:
    epsilon: of the planned steps at the noise used; None without privacy.
    delta: None without privacy.
    metrics: metrics[split][name], of data declared public; empty otherwise.
    steps: steps done.
    wall_seconds: of the process that completed the run.
    workdir: its folder.
    statement: the guarantee in two sentences.
  """

  epsilon: float | None
  delta: float | None
  metrics: dict[str, dict[str, float | None]]
  steps: int
  wall_seconds: float
  workdir: str
  statement: str

  def to_dict(self) -> dict[str, Any]:
    """The fields as JSON values, without the statement."""
    fields = dataclasses.asdict(self)
    del fields["statement"]
    return fields

  def summary(self) -> str:
    """Some lines for people."""
    lines = [
      f"{split}: "
      + ", ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)
      for split, values in self.metrics.items()
    ]
    return "\n".join([*lines, self.statement, f"report: {self.workdir}/report.html"])


def train(
  config: Config,
  workdir: Path,
  *,
  test_key_file: Path | None = None,
  ledger_file: Path | None = None,
  ledger_budget: PrivacySpec | None = None,
  progress: bool = True,
  label: str = "train",
) -> Result:
  """Trains, or goes on with a run that was stopped, or returns the result of a completed one.

  Args:
    config: the configuration.
    workdir: the run's folder; a new one, or that of the same run.
    test_key_file: a fixed secret key. The run is then not private, and says so.
    ledger_file: a ledger that runs on the same data share; None keeps one for this run alone.
    ledger_budget: what all runs of that ledger may spend together; given when it is new.
    progress: whether to show progress on standard error.
    label: what to call the run there.

  Raises:
    ValueError: for anything that cannot be run or guaranteed, before any training.
    Stopped: on SIGTERM, with a checkpoint from which the same call goes on.
  """
  start = time.monotonic()
  run = prepare(config)
  for warning in run.warnings:
    _log.warning("warning: %s", warning)
  fixed_key = None if test_key_file is None else MasterKey.from_file(test_key_file)
  folder = WorkDir(workdir)
  with folder.open(config.to_dict()), _full_disk_is_told(workdir):
    if not folder.result.exists():
      checkpoints = Checkpoints(
        folder.checkpoints, config.checkpoint.keep, run.fingerprint(), config.checkpoint.best_metric
      )
      try:
        begun, ledger = begin(
          run, folder, checkpoints,
          new_key=lambda: fixed_key or MasterKey.from_os(),
          reserve=lambda digest: reserve(run, folder, digest, ledger_file, ledger_budget),
        )  # fmt: skip
        state = begun.state
        if begun.key is not None:
          if run.solving is None:
            state = run_steps(
              run, folder, checkpoints, state, begun.key, progress=progress, label=label
            )
          else:
            state = _solve(run, run.solving, checkpoints, state, begun.key)
        state = checkpoints.best(state)
      finally:
        checkpoints.close()
      # Before anything is released: with a key, the noise could be taken away.
      delete_keys(folder.checkpoints)
      _complete(run, folder, state, begun.test_key, ledger, start)
    return Result(**json.loads(folder.result.read_text()))


def _solve(
  run: Run, solving: Solving, checkpoints: Checkpoints, state: TrainState, key: MasterKey
) -> TrainState:
  """The one step of a solver; when it returns, its checkpoint is on disk.

  A process that is killed before that begins again with the same key, and so with the same noise.
  """
  if int(state.step) == run.mechanism.steps:
    return state
  here = for_environment(key, environment())
  size = run.config.train.microbatch_size
  state = solve_state(
    solving, run.loader, run.expected_batch_size, run.task.spec.num_classes, size, state, here
  )
  checkpoints.save(run.mechanism.steps, state, key)
  checkpoints.wait()
  return state


@contextlib.contextmanager
def _full_disk_is_told(workdir: Path) -> Iterator[None]:
  """Every file is written whole or not at all, or appended to: nothing is lost when one fails."""
  try:
    yield
  except OSError as error:
    if error.errno != errno.ENOSPC:
      raise
    raise OSError(
      f"the disk of {str(workdir)!r} is full; what was saved is intact: make room and give the same"
      " command again."
    ) from error


def _complete(
  run: Run, folder: WorkDir, state: TrainState, test_key: bool, ledger: Ledger, start: float
) -> None:
  """Writes everything that a run leaves; the result last, since it marks completion.

  What the guarantee covers comes first: nothing about the evaluation data can stop it.
  """
  write_parameters(run, folder, state, test_key, ledger)
  evaluation = evaluate_state(run, state)
  log_metrics(run, folder, run.mechanism.steps, evaluation.details(), final=True)
  write_predictions(run, folder, evaluation.table)
  _note_bad_records(run, folder)
  data = run.config.data
  public = data.declared == "public"
  metrics = {data.eval_split: evaluation.scalars()} if public else {}
  record = complete_release(run, folder, metrics)
  render_report(folder.path, {}).chmod(0o644)
  result = Result(
    epsilon=None if record is None else record["epsilon"],
    delta=None if record is None else record["delta"],
    metrics=metrics,
    steps=int(state.step),
    wall_seconds=round(time.monotonic() - start, 3),
    workdir=str(folder.path),
    statement=PLAIN_STATEMENT if record is None else statement(record),
  )
  write_text(folder.result, json.dumps(dataclasses.asdict(result)) + "\n")


def _note_bad_records(run: Run, folder: WorkDir) -> None:
  """Malformed records had zero weight; which they were is not public."""
  notes = {
    split: {str(index): problem for index, problem in loader.bad_records.items()}
    for split, loader in (("train", run.loader), ("eval", run.eval_loader))
  }
  if any(notes.values()):
    write_text(folder.private / "bad_records.json", json.dumps(notes, indent=2) + "\n")
