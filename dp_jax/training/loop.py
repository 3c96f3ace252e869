"""The training loop."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dp_jax.evaluation.classification import ClassificationSums, evaluate
from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.engines import ClipAux
from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.samplers import Sampler
from dp_jax.training.checkpoint import Checkpoints
from dp_jax.training.engine_check import choose_engine
from dp_jax.training.keys import for_environment, step_key
from dp_jax.training.prepare import Run, environment
from dp_jax.training.progress import Progress
from dp_jax.training.step import StepFunctions, TrainState, build_step
from dp_jax.training.workdir import WorkDir, append_line

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
    unit_key, noise_key = (step_key(self.key, purpose, step) for purpose in ("unit", "noise"))
    pieces = self._microbatches(indices)
    if self._is_one_piece(len(indices)):
      ((units, mask, ids),) = pieces
      state, aux = self.functions.whole(
        state, self.run.frozen, units, mask, ids, unit_key, noise_key
      )
      seen = [(aux, mask)]
    else:
      total, seen = pairs.zeros_like(state.params), []
      for units, mask, ids in pieces:
        total, aux = self.functions.accumulate(
          state.params, self.run.frozen, total, units, mask, ids, unit_key
        )
        seen.append((aux, mask))
      state = self.functions.finish(state, total, noise_key)
    self._log_private(step, len(indices), seen)
    return state

  def _is_one_piece(self, size: int) -> bool:
    """Whether to take the step in one call.

    Not where that is the exception, at a run's expected batch size: compiling costs more.
    """
    most = self.run.config.train.microbatch_size
    return 0 < size <= most and self.run.expected_batch_size <= most

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
    with np.errstate(all="ignore"):  # a warning would tell of a record that is not finite
      if size and self.run.privacy is not None:
        if self.run.config.privacy.clipping == "flat":
          entry["clip_fraction"] = float(np.mean(~(norms <= clip_norm)))
        entry["norm_median"] = float(np.median(norms))
      if size:
        entry["loss"] = float(np.mean(losses, dtype=np.float64))
    append_line(self.workdir.training_log, entry)


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
  """
  steps, every = run.mechanism.steps, run.config.eval.every
  loop = _loop(run, workdir, key)
  bar = Progress(steps, int(state.step), run.expected_batch_size, label, enabled=progress)
  spent = _Spent(run)
  for step in range(int(state.step), steps):
    state = loop.step(state, step)
    bar.update(spent.after(step + 1) if progress else None)
    if (step + 1) % run.config.checkpoint.every == 0 or step + 1 == steps:
      checkpoints.save(step + 1, state, key)
    if every and (step + 1) % every == 0 and step + 1 < steps:
      log_metrics(run, workdir, step + 1, evaluate_state(run, state).scalars())
  bar.close()
  checkpoints.wait()
  return state


def evaluate_state(run: Run, state: TrainState) -> ClassificationSums:
  """Evaluates the moving average on the evaluation split."""
  predict = jax.jit(run.released.predict)
  arrays = {**state.average, **run.frozen}
  return evaluate(
    lambda inputs: predict(arrays, inputs),
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


def _loop(run: Run, workdir: WorkDir, key: MasterKey) -> Loop:
  private = run.privacy is not None
  functions = build_step(
    run.task.loss,
    run.optimizer,
    clip_norm=run.mechanism.clip_norm if private else None,
    stddev=run.mechanism.stddev if private else 0.0,
    expected_batch_size=run.expected_batch_size,
    ema=run.config.train.ema,
    engine=choose_engine(run),
    clipping=run.config.privacy.clipping,
    memory_budget=run.config.train.memory_budget,
  )
  here = for_environment(key, environment())
  sampler = run.mechanism.sampler(here, run.loader.num_units)
  return Loop(run, workdir, here, sampler, functions)


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
