"""What hangs off the loop: each hook is called after every step, in order."""

import collections
import json
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

from dp_jax.gradients.engines.dispatch import ClipAux
from dp_jax.parallel.mesh import own_rows
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.training.checkpoints.checkpoint import Checkpoints
from dp_jax.training.progress import Progress
from dp_jax.training.setup.prepare import Run
from dp_jax.training.step import TrainState
from dp_jax.training.tensorboard import Board

# How often the epsilon that is shown is computed anew.
_EPSILON_POINTS = 10
# How long the private log may wait, and of how many units.
_WRITE_SECONDS = 0.5
_PENDING_UNITS = 2**16


class Hook(Protocol):
  """Something that follows the run. It sees the state and must not change it."""

  def after_step(self, step: int, state: TrainState) -> None:
    """Called when `step` steps are done (or under way on the device)."""

  def close(self) -> None:
    """Called once, when the loop ends for whatever reason."""


class _Seen(NamedTuple):
  step: int
  num_units: int
  pieces: list[tuple[ClipAux, np.ndarray]]


class PrivateLog:
  """Training losses and norms of each step: not covered by the guarantee, so under private/ only.

  A line is written when the next step is under way: until then its values are on the device, and
  asking for them would stop the host. Of short steps, some are written together: to make one takes
  less processor time when it is done again at once. Each host has a log of its own, of its share of
  the units: to gather them at each step would make all wait.

  Args:
    path: of the JSON lines.
    run: what was prepared.
    board: where the values are plotted.
  """

  def __init__(self, path: Path, run: Run, board: Board | None = None):
    self._path, self._board = path, board
    self._file: TextIO | None = None
    self._written = time.monotonic()
    private = run.privacy is not None
    self._clip_norm = run.mechanism.clip_norm if private else None
    self._flat = run.config.privacy.clipping == "flat"
    self._pending: collections.deque[_Seen] = collections.deque()

  def add(self, step: int, num_units: int, pieces: list[tuple[ClipAux, np.ndarray]]) -> None:
    """Notes a step that has been handed to the device.

    Args:
      step: steps done with it.
      num_units: of the step, over all hosts.
      pieces: (ClipAux, which of its rows on this host are real) of each microbatch.
    """
    self._pending.append(_Seen(step, num_units, pieces))

  def after_step(self, step: int, state: TrainState) -> None:
    """Writes the lines up to that of the step before, if it is time."""
    del step, state
    units = sum(seen.num_units for seen in self._pending)
    if units > _PENDING_UNITS or time.monotonic() - self._written > _WRITE_SECONDS:
      self._write(leave=1)

  def flush(self) -> None:
    """Writes what is pending."""
    self._write(leave=0)

  def close(self) -> None:
    """Leaves what is pending: of a loop that failed, the values may not exist."""
    if self._file is not None:
      self._file.close()

  def _write(self, leave: int) -> None:
    self._written = time.monotonic()
    while len(self._pending) > leave:
      entry = self._entry(self._pending.popleft())
      if self._file is None:  # and held open from then on: opening it for each line costs more
        self._file = self._path.open("a")
      self._file.write(json.dumps(entry) + "\n")
      self._file.flush()
      if self._board is not None:
        self._board.scalars(entry["step"], "train", entry)

  def _entry(self, seen: _Seen) -> dict[str, Any]:
    pieces = own_rows(seen.pieces)
    norms = np.concatenate([aux.norms[mask] for aux, mask in pieces] or [np.zeros(0)])
    losses = np.concatenate([aux.losses[mask] for aux, mask in pieces] or [np.zeros(0)])
    entry: dict[str, Any] = {"step": seen.step, "units": seen.num_units}
    with np.errstate(all="ignore"):  # a warning would tell of a record that is not finite
      if norms.size and self._clip_norm is not None:
        if self._flat:
          entry["clip_fraction"] = float(np.mean(~(norms <= self._clip_norm)))
        entry["norm_median"] = float(np.median(norms))
      if losses.size:  # a host may hold none of a small step's units
        entry["loss"] = float(np.mean(losses, dtype=np.float64))
    return entry


class ProgressHook:
  """Progress: public numbers only.

  Args:
    progress: what shows them.
    run: what was prepared.
    board: where they are plotted.
  """

  def __init__(self, progress: Progress, run: Run, board: Board | None = None):
    self._progress, self._board = progress, board
    self._spent = EpsilonSpent(run)

  def after_step(self, step: int, state: TrainState) -> None:
    """One more step is done."""
    del state
    wanted = self._progress.enabled or self._board is not None
    epsilon = self._spent.after(step) if wanted else None
    self._progress.update(epsilon)
    if self._board is not None:
      facts = {"epsilon": epsilon, **self._progress.speed()}
      self._board.scalars(step, "run", facts)

  def close(self) -> None:
    """Ends the bar."""
    self._progress.close()


class CheckpointHook:
  """A checkpoint each so many steps, and after the last.

  Args:
    checkpoints: of this run.
    key: the master key, which is an item of each.
    log: is written first, so that no line is missing of a run that goes on from here.
    run: what was prepared.
  """

  def __init__(self, checkpoints: Checkpoints, key: MasterKey, log: PrivateLog, run: Run):
    self._checkpoints, self._key, self._log = checkpoints, key, log
    self._every, self._steps = run.config.checkpoint.every, run.mechanism.steps
    self._saved = checkpoints.latest()

  def after_step(self, step: int, state: TrainState) -> None:
    """Saves if it is time."""
    if step % self._every == 0 or step == self._steps:
      self.save(step, state)

  def save(self, step: int, state: TrainState) -> None:
    """Saves now, unless this step is saved already."""
    if step == self._saved:
      return
    self._log.flush()
    self._checkpoints.save(step, state, self._key)
    self._saved = step

  def close(self) -> None:
    """Nothing: whoever opened the checkpoints closes them."""


class EpsilonSpent:
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
