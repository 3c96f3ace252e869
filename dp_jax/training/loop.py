"""The training loop."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from dp_jax.data.pipeline import Microbatch, Pipeline, cut, default_workers, load_microbatch
from dp_jax.gradients.engines.dispatch import ClipAux
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.parallel.collectives import spread
from dp_jax.parallel.hosts import broadcast, gather, is_process_0
from dp_jax.parallel.mesh import Feed, describe, own_rows, place, put_key
from dp_jax.parallel.stopping import Stopped, StopSignal, listening
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling import Sampler
from dp_jax.solvers.closed_form import ZeroHead
from dp_jax.training.agreement import agree_on_draws
from dp_jax.training.ahead import Ahead, DispatchThrottle, StepInputs, num_bytes
from dp_jax.training.checkpoints.checkpoint import Checkpoints
from dp_jax.training.checkpoints.run_key import environment, for_environment
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.evaluating import Evaluation
from dp_jax.training.flops import units_per_second_at_peak
from dp_jax.training.hooks import CheckpointHook, Hook, PrivateLog, ProgressHook
from dp_jax.training.progress import Progress
from dp_jax.training.setup.engine_check import choose_engine
from dp_jax.training.setup.prepare import Run
from dp_jax.training.step import StepFunctions, TrainState, build_step
from dp_jax.training.tensorboard import Board
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
    ahead: keeps what the next steps need.
    pace: holds the host back.
  """

  run: Run
  key: MasterKey
  sampler: Sampler
  functions: StepFunctions
  log: PrivateLog
  feed: Feed
  pipeline: Pipeline | None = None
  zero_head: ZeroHead | None = None
  ahead: Ahead = dataclasses.field(default_factory=Ahead)
  pace: DispatchThrottle = dataclasses.field(default_factory=DispatchThrottle)

  def step(self, state: TrainState, step: int) -> TrainState:
    """One released step: sample, clip and sum by microbatches, add noise once, update.

    An empty batch is a step like any other: `finish` runs, adds the noise, and counts. The device
    may still be at work when this returns; `DispatchThrottle` says how far. Whatever goes to it or
    comes from it is asked for by name: a transfer by accident would stop the host at each step.
    """
    with jax.transfer_guard("disallow"):
      indices, unit_key, noise_key, piece = self.ahead.take(
        step, self.run.mechanism.steps, self._inputs
      )
      if step == 0 and self.zero_head is not None:
        total, seen = sum_at_zero(self.run, self.zero_head, indices)
        state = self.functions.finish(state, spread(total, self.run.mesh), noise_key)
      elif self._is_one_piece(len(indices)):
        units, mask, ids = piece or next(self._microbatches(indices))
        state, aux = self.functions.whole(
          state, self.run.frozen, units, mask, ids, unit_key, noise_key
        )
        seen = [(aux, self._real(len(indices), 0))]
        self.pace.begun(aux.losses, num_bytes(units))
      else:
        state, seen = self._in_pieces(state, indices, unit_key, noise_key)
        if seen:
          self.pace.begun(seen[-1][0].losses, None)
    self.log.add(step + 1, len(indices), seen)
    return state

  def _in_pieces(
    self, state: TrainState, indices: np.ndarray, unit_key: jax.Array, noise_key: jax.Array
  ) -> tuple[TrainState, list[tuple[ClipAux, np.ndarray]]]:
    total, seen = self.functions.zeros(state.params), []
    for number, (units, mask, ids) in enumerate(self._microbatches(indices)):
      total, aux = self.functions.accumulate(
        state.params, self.run.frozen, total, units, mask, ids, unit_key
      )
      seen.append((aux, self._real(len(indices), number)))
      if len(seen) > _AHEAD:
        # Waits for the device: units that are handed over faster than they are used would pile up.
        seen[-1 - _AHEAD] = own_rows(seen[-1 - _AHEAD])
    return self.functions.finish(state, total, noise_key), seen

  def _real(self, count: int, number: int) -> np.ndarray:
    """Which of this host's rows of a microbatch are real: its mask, without asking a device.

    Args:
      count: units of the step.
      number: of the microbatch, from 0.
    """
    return self.feed.rows < count - number * self.feed.size

  def _inputs(self, step: int) -> StepInputs:
    """What a step needs, but for microbatches that threads load or that are many."""
    indices = self.sampler.indices(step)
    unit_key, noise_key = (
      put_key(step_key(self.key, purpose, step), self.run.mesh) for purpose in ("unit", "noise")
    )
    early = self._is_one_piece(len(indices)) and not (step == 0 and self.zero_head is not None)
    piece = next(self._microbatches(indices)) if early and self.pipeline is None else None
    return StepInputs(indices, unit_key, noise_key, piece)

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
      peak=units_per_second_at_peak(run), enabled=progress and is_process_0(),
    )  # fmt: skip
    saving = CheckpointHook(checkpoints, key, loop.log, run)
    # Saving last: whoever goes on from a checkpoint has all that the other hooks made of its step.
    hooks: tuple[Hook, ...] = (
      loop.log, ProgressHook(bar, run, board), Evaluation(run, workdir, checkpoints, board), saving
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
    engine="auto" if only_zero else broadcast(choose_engine(run)),
    clipping=run.config.privacy.clipping,
    memory_budget=run.config.train.memory_budget,
    exact=run.mechanism.adjacency == "add_or_remove_one",
    mesh=run.mesh,
    noise=run.noise,
  )
  environments = "; ".join(sorted(set(gather(environment()))))
  here = for_environment(key, f"{environments}, {describe(run.mesh)}")
  sampler = run.mechanism.sampler(here, run.loader.num_units)
  placed = dataclasses.replace(run, frozen=place(run.frozen, run.mesh))
  feed = Feed(run.mesh, run.config.train.microbatch_size)
  log = PrivateLog(workdir.training_log(jax.process_index()), run, board)
  return Loop(placed, here, sampler, functions, log, feed, zero_head=zero_head)


@contextlib.contextmanager
def _board(run: Run, workdir: WorkDir, done: int) -> Iterator[Board | None]:
  """The event files of the run, if it is to have any."""
  if not run.config.train.tensorboard or not is_process_0():
    yield None
    return
  board = Board(workdir.tensorboard(run.config.data.declared), done)
  try:
    yield board
  finally:
    board.close()
