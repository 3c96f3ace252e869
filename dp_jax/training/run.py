"""`train`: one run from a configuration to what it leaves behind."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dp_jax.config.run_config import Config
from dp_jax.data.sources.custom import GIVEN as SOURCE_GIVEN
from dp_jax.errors import UserError
from dp_jax.files.atomic import write_text
from dp_jax.models.opening import ModelObject
from dp_jax.parallel.hosts import (
  broadcast,
  is_process_0,
  on_all_hosts,
  on_process_0,
  share_key,
  stopping_all,
)
from dp_jax.parallel.mesh import to_host
from dp_jax.parallel.stopping import Stopped
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.report.html import render_report
from dp_jax.statement.sentences import PLAIN_STATEMENT, statement
from dp_jax.tasks.evaluate import HeldOut
from dp_jax.tasks.task import Task
from dp_jax.training.agreement import agree_on_run, check_shared
from dp_jax.training.checkpoints.budget import finish, reserve
from dp_jax.training.checkpoints.checkpoint import Checkpoints, delete_keys
from dp_jax.training.checkpoints.run_key import environment, for_environment
from dp_jax.training.checkpoints.start import begin
from dp_jax.training.checkpoints.workdir import WorkDir, owner_only
from dp_jax.training.completing import note_bad_records, release_stands
from dp_jax.training.evaluating import evaluate_state, log_metrics
from dp_jax.training.held_out import write_predictions
from dp_jax.training.loop import run_steps
from dp_jax.training.release import add_evaluation, complete_release, write_parameters
from dp_jax.training.setup.first_records import REMINDER, check_all_records
from dp_jax.training.setup.given import Given
from dp_jax.training.setup.open_data import is_strict
from dp_jax.training.setup.prepare import Run, prepare
from dp_jax.training.solving import Solving, solve_state
from dp_jax.training.step import TrainState

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
      + (
        ", ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)
        or "no record of the split could be used"
      )
      for split, values in self.metrics.items()
    ]
    return "\n".join([*lines, self.statement, f"report: {self.workdir}/report.html"])


def train(
  config: Config | Mapping[str, Any],
  workdir: str | os.PathLike[str],
  *,
  model: ModelObject | None = None,
  task: Task | None = None,
  source: Any = None,
  eval_source: Any = None,
  test_key_file: Path | None = None,
  ledger_file: Path | None = None,
  ledger_budget: PrivacySpec | None = None,
  progress: bool = True,
  label: str = "train",
) -> Result:
  """Trains, or goes on with a run that was stopped, or returns the result of a completed one.

  ```
  result = dp_jax.train(
    {"privacy": {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.1}, "train": {"steps": 200},
     "data": {"num_classes": 2, "value_range": (0.0, 1.0)}},
    "runs/mine", model=my_nnx_module, source={"inputs": x, "label": y, "patient": ids},
    eval_source={"inputs": x_test, "label": y_test, "patient": ids_test},
  )
  ```

  Args:
    config: the configuration, or its sections as nested dictionaries.
    workdir: the run's folder; a new one, or that of the same run.
    model: in the place of config.model.name and kwargs: an `nnx.Module`; (a `linen.Module`, its
      variables); or functions (init, apply), as `dp_jax.models.opening.from_object` takes them.
    task: in the place of config.task: a `dp_jax.tasks.task.Task`.
    source: in the place of config.data.source: NumPy arrays by name, all with a row a record, or a
      data set with `__len__` and `__getitem__`, which gives such dictionaries.
    eval_source: the like for data.eval_split.
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
  workdir = Path(workdir)
  if not isinstance(config, Config):
    given_data = {"source": SOURCE_GIVEN} if source is not None else {}
    config = Config.from_dict({**config, "data": {**given_data, **config.get("data", {})}})
  if (source is None) != (eval_source is None) or (
    (source is not None) != (config.data.source == SOURCE_GIVEN)
  ):
    raise UserError(
      f"data.source={config.data.source!r}: source and eval_source go together, and with"
      f" data.source={SOURCE_GIVEN!r}."
    )
  given = Given(model, task, source, eval_source)
  run = on_all_hosts(lambda: prepare(config, given))
  for warning in run.warnings:
    _log.warning("warning: %s", warning)
  fixed_key = on_all_hosts(
    lambda: None if test_key_file is None else MasterKey.from_file(test_key_file)
  )
  agree_on_run(run, fixed_key)
  folder = WorkDir(workdir)
  with contextlib.ExitStack() as stack:
    on_process_0(lambda: stack.enter_context(folder.open(config.to_dict())))
    stack.enter_context(owner_only())
    stack.enter_context(_full_disk_is_told(workdir))
    check_shared(workdir)
    if not broadcast(folder.result.exists()):
      checkpoints = Checkpoints(
        folder.checkpoints, config.checkpoint.keep, run.fingerprint(), environment(),
        config.checkpoint.best_metric,
      )  # fmt: skip
      try:
        with stopping_all(private=not _is_public(run), folder=folder.path):
          if checkpoints.latest() is None:
            on_all_hosts(lambda: _check_all(run, progress))
          begun, ledger = begin(
            run, folder, checkpoints,
            new_key=lambda: fixed_key or share_key(MasterKey.from_os),
            reserve=lambda digest: reserve(run, folder, digest, ledger_file, ledger_budget),
          )  # fmt: skip
          state = begun.state
          if begun.key is not None:
            if run.solving is None:
              try:
                state = run_steps(
                  run, folder, checkpoints, state, begun.key, progress=progress, label=label
                )
              except Stopped:  # on all hosts
                note_bad_records(run, folder)
                raise
            else:
              state = _solve(run, run.solving, checkpoints, state, begun.key)
          state, released = checkpoints.best(state)
      finally:
        checkpoints.close()
      # Before anything is released: with a key, the noise could be taken away.
      on_process_0(lambda: delete_keys(folder.checkpoints))
      with stopping_all(private=not _is_public(run), folder=folder.path):
        on_process_0(lambda: finish(folder, ledger, ledger_file))
        _complete(run, folder, state, released, begun.test_key, ledger, start)
    if not _is_public(run):
      _log.info(REMINDER)
    # The folder may have been moved since.
    done = broadcast(json.loads(folder.result.read_text()) if is_process_0() else None)
    return Result(**{**done, "workdir": str(folder.path)})


def _check_all(run: Run, progress: bool) -> None:
  """Where a malformed record would stop a step, none is left once the budget is reserved."""
  data = run.config.data
  if is_strict(data) and data.check == "all":
    loaders, where = [run.loader, run.eval_loader], str(Path(data.path or "").absolute())
    check_all_records(loaders, where, shown=_is_public(run), progress=progress)


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
  state = solve_state(solving, run.loader, run.expected_batch_size, size, state, here)
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
  run: Run,
  folder: WorkDir,
  state: TrainState,
  released: int,
  test_key: bool,
  ledger: Ledger | None,
  start: float,
) -> None:
  """Writes everything that a run leaves; the result last, since it marks completion.

  `released` is the step whose parameters are released: the last, or the best.

  What the guarantee covers comes first, whole: nothing about the evaluation data can stop it.
  """
  whole = state._replace(average=to_host(state.average))
  # Process 0 has a ledger.
  on_process_0(
    lambda: write_parameters(run, folder, whole, released, test_key, cast(Ledger, ledger))
  )
  on_process_0(lambda: complete_release(run, folder))
  with release_stands(run, folder):
    note_bad_records(run, folder)
    evaluation = evaluate_state(run, state)
    note_bad_records(run, folder)
    on_process_0(lambda: _write_measured(run, folder, released, evaluation))
    on_process_0(lambda: _write_result(run, folder, int(state.step), evaluation, start))


def _is_public(run: Run) -> bool:
  return run.config.data.declared == "public"


def _write_measured(
  run: Run,
  folder: WorkDir,
  released: int,
  evaluation: HeldOut,
) -> None:
  log_metrics(run, folder, released, evaluation.details(), final=True)
  write_predictions(run, folder, released, evaluation.table)
  if run.loader.look_alike:  # which ids do is not public
    text = json.dumps(run.loader.look_alike, indent=2) + "\n"
    write_text(folder.private / "unit_ids_that_look_alike.json", text)
  # Nor how many records are not used, or whose.
  counts = {
    "records_beyond_max_records_per_unit": run.loader.num_cut,
    "unit_ids_not_written_as_they_are_compared": run.loader.num_respelled,
  }
  if any(counts.values()):
    write_text(folder.private / "units.json", json.dumps(counts, indent=2) + "\n")


def _write_result(
  run: Run,
  folder: WorkDir,
  steps: int,
  evaluation: HeldOut,
  start: float,
) -> None:
  record = add_evaluation(run, folder, evaluation.scalars())
  render_report(folder.path, {}).chmod(0o644)
  result = Result(
    epsilon=None if record is None else record["epsilon"],
    delta=None if record is None else record["delta"],
    metrics={run.config.data.eval_split: evaluation.scalars()} if _is_public(run) else {},
    steps=steps,
    wall_seconds=round(time.monotonic() - start, 3),
    workdir=str(folder.path),
    statement=PLAIN_STATEMENT if record is None else statement(record),
  )
  write_text(folder.result, json.dumps(dataclasses.asdict(result)) + "\n")
