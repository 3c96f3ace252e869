"""The training loop."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dp_jax.data.pipeline import Microbatch, Pipeline, cut, default_workers, load_microbatch
from dp_jax.evaluation.classification import HeldOut, evaluate
from dp_jax.evaluation.multilabel import HeldOutLabels
from dp_jax.gradients.clipping import plain_units_under_removal
from dp_jax.gradients.engines import ClipAux
from dp_jax.gradients.keys import step_key
from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.samplers import Sampler
from dp_jax.solvers.closed_form import ZeroHead
from dp_jax.training.agreement import agree_on_draws
from dp_jax.training.checkpoint import Checkpoints
from dp_jax.training.collectives import spread
from dp_jax.training.distributed import from_first, gather, is_first, on_first
from dp_jax.training.engine_check import choose_engine
from dp_jax.training.flops import units_per_second_at_peak
from dp_jax.training.held_out import keep_step
from dp_jax.training.hooks import Hook, PrivateLog, Saving, Shown
from dp_jax.training.keys import for_environment
from dp_jax.training.mesh import Feed, describe, own_rows, place, put_key, shared_predict, to_host
from dp_jax.training.prepare import Run, environment
from dp_jax.training.progress import Progress
from dp_jax.training.step import StepFunctions, TrainState, build_step
from dp_jax.training.stopping import Stopped, StopSignal, listening
from dp_jax.training.tensorboard import Board
from dp_jax.training.workdir import WorkDir, append_line
from dp_jax.training.zero_head import head_at_zero, sum_at_zero

# How many microbatches may be on the devices at a time: one at work, and the next.
_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Loop:
  """A run in progress: its parts, each made once.

  Attributes:
    run: what was prepared.
    key: the master key for this software and hardware.
    sampler: of the mechanism; there is no other source of indices.
    functions: the compiled step.
    log: takes what the steps saw.
    feed: puts microbatches on the devices.
    pipeline: loads the microbatches ahead; None loads each when it is needed.
    zero_head: serves the first step in place of `functions.accumulate`, where it can.
  """

  run: Run
  key: MasterKey
  sampler: Sampler
  functions: StepFunctions
  log: PrivateLog
  feed: Feed
  pipeline: Pipeline | None = None
  zero_head: ZeroHead | None = None

  def step(self, state: TrainState, step: int) -> TrainState:
    """One released step: sample, clip and sum by microbatches, add noise once, update.

    An empty batch is a step like any other: `finish` runs, adds the noise, and counts. The device
    may still be at work when this returns. Whatever goes to it or comes from it is asked for by
    name: a transfer by accident would stop the host at each step.
    """
    with jax.transfer_guard("disallow"):
      indices = self.sampler.indices(step)
      unit_key, noise_key = (
        put_key(step_key(self.key, purpose, step), self.run.mesh) for purpose in ("unit", "noise")
      )
      pieces = self._microbatches(indices)
      if step == 0 and self.zero_head is not None:
        total, seen = sum_at_zero(self.run, self.zero_head, indices)
        state = self.functions.finish(state, spread(total, self.run.mesh), noise_key)
      elif self._is_one_piece(len(indices)):
        ((units, mask, ids),) = pieces
        state, aux = self.functions.whole(
          state, self.run.frozen, units, mask, ids, unit_key, noise_key
        )
        seen = [(aux, mask)]
      else:
        state, seen = self._in_pieces(state, pieces, unit_key, noise_key)
    self.log.add(step + 1, len(indices), seen)
    return state

  def _in_pieces(
    self, state: TrainState, pieces: Iterator[Any], unit_key: jax.Array, noise_key: jax.Array
  ) -> tuple[TrainState, list[tuple[ClipAux, jax.Array]]]:
    total, seen = self.functions.zeros(state.params), []
    for units, mask, ids in pieces:
      total, aux = self.functions.accumulate(
        state.params, self.run.frozen, total, units, mask, ids, unit_key
      )
      seen.append((aux, mask))
      if len(seen) > _AHEAD:
        # Waits for the device: units that are handed over faster than they are used would pile up.
        seen[-1 - _AHEAD] = own_rows(seen[-1 - _AHEAD])
    return self.functions.finish(state, total, noise_key), seen

  def _is_one_piece(self, size: int) -> bool:
    """Whether to take the step in one call.

    Not where that is the exception, at a run's expected batch size: compiling costs more.
    """
    most = self.feed.size
    return 0 < size <= most and self.run.expected_batch_size <= most

  def _microbatches(self, indices: np.ndarray) -> Iterator[Microbatch]:
    """Cuts a batch into padded pieces of one shape, on the devices."""
    for part in cut(indices, self.feed.size):
      if self.pipeline is None:
        yield self.feed.put(load_microbatch(self.run.loader, part, self.feed.size, self.feed.rows))
      else:
        yield self.pipeline.take(part)

  @contextlib.contextmanager
  def loading_ahead(self, steps: range) -> Iterator["Loop"]:
    """The same loop, with the microbatches of these steps loaded by threads."""
    data, feed = self.run.config.data, self.feed
    workers = default_workers(self.run.loader.source_info) if data.workers is None else data.workers
    if self.zero_head is not None:  # which reads what it needs
      steps = range(max(steps.start, 1), steps.stop)
    if workers == 0 or not steps:
      yield self
      return
    pipeline = Pipeline(
      self.run.loader, self.sampler.indices, steps, feed.size, workers=workers,
      prefetch=data.prefetch or workers + 2, rows=feed.rows, put=feed.put,
    )  # fmt: skip
    with pipeline:
      yield dataclasses.replace(self, pipeline=pipeline)


def run_steps(
  run: Run,
  workdir: WorkDir,
  checkpoints: Checkpoints,
  state: TrainState,
  key: MasterKey,
  *,
  progress: bool,
  label: str,
) -> TrainState:
  """Trains from `state` to the last step; when it returns, that step's checkpoint is on disk.

  Args:
    run: what `prepare` returned.
    workdir: the run's folder, already opened.
    checkpoints: of this run.
    state: where to go on.
    key: the master key.
    progress: whether to show progress.
    label: what to call the run there.

  Raises:
    Stopped: on SIGTERM, once the step under way is saved.
  """
  done, steps = int(state.step), run.mechanism.steps
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(listening())
    board = stack.enter_context(_board(run, workdir, done))
    loop = _loop(run, workdir, key, board)
    agree_on_draws(loop.key, loop.sampler, done, steps)
    loop = stack.enter_context(loop.loading_ahead(range(done, steps)))
    bar = Progress(
      steps, done, run.expected_batch_size, label,
      peak=units_per_second_at_peak(run), enabled=progress and is_first(),
    )  # fmt: skip
    saving = Saving(checkpoints, key, loop.log, run)
    # Saving last: whoever goes on from a checkpoint has all that the other hooks made of its step.
    hooks: tuple[Hook, ...] = (
      loop.log, Shown(bar, run, board), Evaluation(run, workdir, checkpoints, board), saving
    )  # fmt: skip
    for hook in hooks:
      stack.callback(hook.close)
    state = follow(loop, hooks, state, range(done, steps), stop)
    reached = int(state.step)
    saving.save(reached, state)
    checkpoints.wait()
    if reached < steps:
      raise Stopped(
        f"asked to stop: step {reached} of {steps} is saved; the same command goes on from there"
      )
  return state


def follow(
  loop: Loop, hooks: tuple[Hook, ...], state: TrainState, steps: range, stop: StopSignal
) -> TrainState:
  """Takes the steps, each followed by the hooks, until it is asked to stop."""
  for step in steps:
    state = loop.step(state, step)
    for hook in hooks:
      hook.after_step(step + 1, state)
    if stop.asked_at(step + 1):
      break
  return state


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
    held_out = evaluate_state(self._run, state)
    metrics = held_out.scalars()
    if wanted:
      self._checkpoints.save_if_best(step, state, metrics)
    log_metrics(self._run, self._workdir, step, metrics)
    if self._board is not None:
      self._board.scalars(step, "eval", metrics)
    if self._run.privacy is None:
      whole = state._replace(average=to_host(state.average))
      on_first(lambda: keep_step(self._run, self._workdir, step, whole, held_out.table))

  def close(self) -> None:
    """Nothing is held."""


def evaluate_state(run: Run, state: TrainState) -> HeldOut | HeldOutLabels:
  """Evaluates the moving average on the evaluation split."""
  arrays = {**state.average, **place(run.frozen, run.mesh)}
  return evaluate(
    shared_predict(run.released.predict, arrays, run.mesh),
    run.eval_loader,
    run.task.spec.num_classes,
    run.config.eval.microbatch_size,
  )


def log_metrics(
  run: Run, workdir: WorkDir, step: int, metrics: dict[str, Any], *, final: bool = False
) -> None:
  """Appends an evaluation to the log that the declared data allows."""
  data = run.config.data
  entry = {"step": step, "split": data.eval_split, "metrics": metrics}
  append_line(workdir.metrics_log(data.declared), {**entry, **({"final": True} if final else {})})


def _loop(run: Run, workdir: WorkDir, key: MasterKey, board: Board | None = None) -> Loop:
  private, zero_head = run.privacy is not None, head_at_zero(run)
  only_zero = zero_head is not None and run.mechanism.steps == 1
  functions = build_step(
    run.loss,
    run.optimizer,
    clip_norm=run.mechanism.clip_norm if private else None,
    stddev=run.mechanism.stddev if private else 0.0,
    expected_batch_size=run.expected_batch_size,
    ema=run.config.train.ema,
    engine="auto" if only_zero else from_first(choose_engine(run)),
    clipping=run.config.privacy.clipping,
    memory_budget=run.config.train.memory_budget,
    plain_units=(
      plain_units_under_removal(run.expected_batch_size)
      if run.mechanism.adjacency == "add_or_remove_one"
      else None
    ),
    mesh=run.mesh,
  )
  environments = "; ".join(sorted(set(gather(environment()))))
  here = for_environment(key, f"{environments}, {describe(run.mesh)}")
  sampler = run.mechanism.sampler(here, run.loader.num_units)
  placed = dataclasses.replace(run, frozen=place(run.frozen, run.mesh))
  feed = Feed(run.mesh, run.config.train.microbatch_size)
  log = PrivateLog(workdir.training_log, run, board)
  return Loop(placed, here, sampler, functions, log, feed, zero_head=zero_head)


@contextlib.contextmanager
def _board(run: Run, workdir: WorkDir, done: int) -> Iterator[Board | None]:
  """The event files of the run, if it is to have any."""
  if not run.config.train.tensorboard or not is_first():
    yield None
    return
  board = Board(workdir.tensorboard(run.config.data.declared), done)
  try:
    yield board
  finally:
    board.close()
