"""The training loop."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dp_jax.evaluation.classification import ClassificationSums, evaluate
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.clipping import ClipAux
from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.samplers import Sampler
from dp_jax.report.atomic import write_text
from dp_jax.training.checkpoint import Checkpoints
from dp_jax.training.keys import for_environment, step_key
from dp_jax.training.prepare import Run, environment
from dp_jax.training.progress import Progress
from dp_jax.training.step import StepFunctions, TrainState, build_step, init_state
from dp_jax.training.workdir import WorkDir, append_line, cut_log

_log = logging.getLogger(__name__)

# How often the progress bar's epsilon is computed anew.
_EPSILON_POINTS = 10


@dataclasses.dataclass(frozen=True)
class Loop:
  """A run in progress: its parts, each made once.

  Attributes:
    run: what was prepared.
    workdir: its folder, held open by the caller.
    key: the master key for this software and hardware.
    sampler: of the mechanism; there is no other source of indices.
    functions: the compiled step.
  """

  run: Run
  workdir: WorkDir
  key: MasterKey
  sampler: Sampler
  functions: StepFunctions

  def step(self, state: TrainState, step: int) -> TrainState:
    """One released step: sample, clip and sum by microbatches, add noise once, update.

    An empty batch is a step like any other: `finish` runs, adds the noise, and counts.
    """
    indices = self.sampler.indices(step)
    unit_key = step_key(self.key, "unit", step)
    total = pairs.zeros_like(state.params)
    seen = []
    for units, mask, ids in self._microbatches(indices):
      total, aux = self.functions.accumulate(
        state.params, self.run.frozen, total, units, mask, ids, unit_key
      )
      seen.append((aux, mask))
    state = self.functions.finish(state, total, step_key(self.key, "noise", step))
    self._log_private(step, len(indices), seen)
    return state

  def evaluate(self, state: TrainState) -> ClassificationSums:
    """Evaluates the moving average on the evaluation split."""
    predict = _predictor(self.run, state.average)
    return evaluate(
      predict, self.run.eval_loader, self.run.task.spec.num_classes,
      self.run.config.eval.microbatch_size,
    )  # fmt: skip

  def _microbatches(self, indices: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Cuts a batch into padded pieces of one shape: (units, mask, unit ids)."""
    size = self.run.config.train.microbatch_size
    for start in range(0, len(indices), size):
      part = indices[start : start + size]
      units, mask = self.run.loader.load(part, size)
      ids = np.zeros(size, np.uint32)
      ids[: len(part)] = part
      yield units, mask, ids

  def _log_private(self, step: int, size: int, seen: list[tuple[ClipAux, np.ndarray]]) -> None:
    """Training losses and norms: not covered by the guarantee, so under private/ only."""
    norms = np.concatenate([np.asarray(aux.norms)[mask] for aux, mask in seen] or [np.zeros(0)])
    losses = np.concatenate([np.asarray(aux.losses)[mask] for aux, mask in seen] or [np.zeros(0)])
    clip_norm = self.run.mechanism.clip_norm
    entry: dict[str, Any] = {"step": step + 1, "units": size}
    if size and self.run.privacy is not None:
      entry["clip_fraction"] = float(np.mean(~(norms <= clip_norm)))
      entry["norm_median"] = float(np.median(norms))
    if size:
      entry["loss"] = float(np.mean(losses))
    append_line(self.workdir.training_log, entry)


def run_loop(
  run: Run, workdir: WorkDir, new_key: Callable[[], MasterKey], *, progress: bool, label: str
) -> tuple[TrainState, ClassificationSums, MasterKey]:
  """Trains to the last step, from the latest checkpoint if there is one.

  Args:
    run: what `prepare` returned.
    workdir: the run's folder, already opened.
    new_key: draws the master key of a run that starts.
    progress: whether to show progress.
    label: what to call the run there.

  Returns:
    The final state, its evaluation, and the master key.

  Raises:
    ValueError: if the checkpoint there is of another run.
  """
  steps = run.mechanism.steps
  state = init_state(run.params, run.optimizer)
  checkpoints = Checkpoints(workdir.checkpoints, run.config.checkpoint.keep, run.fingerprint())
  try:
    state, key = _start(state, checkpoints, new_key)
    _cut_logs(run, workdir, int(state.step))
    loop = _loop(run, workdir, key)
    bar = Progress(steps, int(state.step), run.expected_batch_size, label, enabled=progress)
    spent = _Spent(run)
    for step in range(int(state.step), steps):
      state = loop.step(state, step)
      bar.update(spent.after(step + 1) if progress else None)
      if (step + 1) % run.config.checkpoint.every == 0 or step + 1 == steps:
        checkpoints.save(step + 1, state, key)
      if run.config.eval.every and (step + 1) % run.config.eval.every == 0 and step + 1 < steps:
        _log_metrics(run, workdir, step + 1, loop.evaluate(state).scalars())
    bar.close()
    _note_bad_records(run, workdir)
    checkpoints.wait()
    return state, loop.evaluate(state), key
  finally:
    checkpoints.close()


def _start(
  state: TrainState, checkpoints: Checkpoints, new_key: Callable[[], MasterKey]
) -> tuple[TrainState, MasterKey]:
  if checkpoints.latest() is not None:
    state, saved_key = checkpoints.restore(state)
    if saved_key is None:
      raise ValueError("the keys of this run were deleted when it completed; use a new workdir.")
    _log.info("resuming after step %d", int(state.step))
    return state, saved_key
  key = new_key()
  # Before step 0, and waited for: a restart must draw the same noise, or two different noisings
  # of the same gradients would exist.
  checkpoints.save(0, state, key)
  checkpoints.wait()
  return state, key


def _loop(run: Run, workdir: WorkDir, key: MasterKey) -> Loop:
  private = run.privacy is not None
  functions = build_step(
    run.task.loss,
    run.optimizer,
    clip_norm=run.mechanism.clip_norm if private else None,
    stddev=run.mechanism.stddev if private else 0.0,
    expected_batch_size=run.expected_batch_size,
    ema=run.config.train.ema,
    engine=run.config.train.engine,
  )
  here = for_environment(key, environment())
  sampler = run.mechanism.sampler(here, run.loader.num_units)
  return Loop(run, workdir, here, sampler, functions)


def _predictor(run: Run, params: Any) -> Callable[[np.ndarray], Any]:
  predict = jax.jit(run.task.predict)
  arrays = {**params, **run.frozen}
  return lambda images: predict(arrays, images)


class _Spent:
  """Epsilon after so many steps, computed now and then: composing takes longer than a step."""

  def __init__(self, run: Run):
    self._mechanism: Mechanism | None = run.mechanism if run.privacy else None
    self._delta = run.privacy.delta if run.privacy else 0.0
    self._every = max(1, run.mechanism.steps // _EPSILON_POINTS)
    self._epsilon: float | None = None

  def after(self, step: int) -> float | None:
    """Rounded up to the next point that is computed, so that it is never too small."""
    if self._mechanism is None:
      return None
    if self._epsilon is None or step % self._every == 1 or self._every == 1:
      upcoming = min(step + self._every - 1, self._mechanism.steps)
      self._epsilon = self._mechanism.epsilon(self._delta, upcoming)
    return self._epsilon


def _log_metrics(run: Run, workdir: WorkDir, step: int, metrics: dict[str, Any]) -> None:
  data = run.config.data
  entry = {"step": step, "split": data.eval_split, "metrics": metrics}
  append_line(workdir.metrics_log(data.declared), entry)


def _cut_logs(run: Run, workdir: WorkDir, step: int) -> None:
  cut_log(workdir.training_log, step)
  cut_log(workdir.metrics_log(run.config.data.declared), step)


def _note_bad_records(run: Run, workdir: WorkDir) -> None:
  """Malformed records had zero weight; which they were is not public."""
  notes = {
    split: {str(index): problem for index, problem in loader.bad_records.items()}
    for split, loader in (("train", run.loader), ("eval", run.eval_loader))
  }
  if any(notes.values()):
    write_text(workdir.private / "bad_records.json", json.dumps(notes, indent=2) + "\n")
