"""Checkpoints by orbax, from which the same command goes on, bit for bit.

Each holds the state, what is secret as items of its own (the key, and what the noise keeps for
later steps), whether that key is a test key, and a fingerprint of what must not change. A resumed
run draws the same batches and the same noise. Under a changed mechanism, model or data that would
add old noise to a new gradient, and the difference of the two would reveal it; so it is refused,
with each difference named.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from dp_jax.errors import UserError
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training.checkpoints.integrity import seal, state_sums
from dp_jax.training.checkpoints.workdir import compare
from dp_jax.training.step import TrainState

PyTree = Any

BEST = "best"
# Items that are deleted before anything is released. The key goes first: without it, what the noise
# keeps is not read.
_SECRETS = ("keys", "noise")
# Those on their way out; orbax does not take the name for that of a checkpoint.
_REMOVED = ".removed_keys_"
# Of these metrics less is better.
_LOWER = ("loss", "calibration_error", "perplexity")

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    state: of the run.
    key: the master key; None once the last step was saved and the keys were deleted.
    key_digest: of the master key.
    test_key: whether that is a test key.
    environment: where it was made.
  """

  state: TrainState
  key: MasterKey | None
  key_digest: str
  test_key: bool
  environment: str


class Checkpoints:
  """The checkpoints of one run: the latest, and the best by a public metric if one is named.

  The best has a manager of its own: one that keeps the best deletes the latest.

  Args:
    path: the folder `checkpoints/`.
    keep: how many of the latest to keep.
    fingerprint: what must be the same when the run goes on; JSON values.
    environment: the software and hardware that the run is on.
    best_metric: keep the checkpoint that is best by it as well, under `best/`.
  """

  def __init__(
    self,
    path: Path,
    keep: int,
    fingerprint: Mapping[str, Any],
    environment: str,
    best_metric: str | None = None,
  ):
    self._path, self._environment = path, environment
    # As JSON reads it back, so that tuples and lists compare equal.
    self._fingerprint = json.loads(json.dumps(fingerprint))
    self._manager = _manager(path, ocp.CheckpointManagerOptions(max_to_keep=keep))
    self._best = None
    if best_metric is not None:
      (path / BEST).mkdir(exist_ok=True, mode=0o700)
      self._best = _manager(
        path / BEST,
        ocp.CheckpointManagerOptions(
          max_to_keep=1,
          best_fn=lambda metrics: metrics[best_metric],
          best_mode="min" if best_metric in _LOWER else "max",
        ),
      )

  def latest(self) -> int | None:
    """The step of the latest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, key: MasterKey) -> None:
    """Saves in the background; a checkpoint counts only once it is complete.

    Raises:
      OSError: if this one or the one before could not be written; those that were are intact.
    """
    public, noise = _parts(state)
    about = {
      "test_key": key.is_test, "key_digest": key.digest(),
      "sums": state_sums(state._replace(noise=())),  # of what is secret, a checksum is too
      "environment": self._environment,
    }  # fmt: skip
    about["seal"] = seal(self._fingerprint, about)
    secret: dict[str, Any] = {"secret": key.secret.hex()}
    items = {"state": ocp.args.StandardSave(public)}
    if noise:
      items["noise"] = ocp.args.StandardSave(noise)
      secret["noise_sums"] = state_sums(noise)  # not in `about`, which stays
    items |= {
      "keys": ocp.args.JsonSave(secret),
      "about": ocp.args.JsonSave(about),
      "fingerprint": ocp.args.JsonSave(self._fingerprint),
    }
    with self._writing():
      self._manager.save(step, args=ocp.args.Composite(**items))

  def wait(self) -> None:
    """Returns when what was saved is on disk; OSError as for `save`."""
    with self._writing():
      self._manager.wait_until_finished()

  def save_if_best(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
    """Saves what would be released if the metric is the best so far; on disk when this returns."""
    if self._best is None:
      return
    with self._writing():
      saved = {"average": state.average}
      args = ocp.args.Composite(
        state=ocp.args.StandardSave(saved), about=ocp.args.JsonSave({"sums": state_sums(saved)})
      )
      self._best.save(step, args=args, metrics=dict(metrics))
      self._best.wait_until_finished()

  def best(self, state: TrainState) -> tuple[TrainState, int]:
    """What to release: the average of the best checkpoint, or of `state` where no best is kept.

    Returns:
      The state with that average, and the step that it is of.

    Raises:
      ValueError: if that checkpoint cannot be read.
    """
    step = None if self._best is None else self._best.best_step()
    if self._best is None or step is None:
      return state, int(state.step)
    shapes = _shapes({"average": state.average})
    args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), about=ocp.args.JsonRestore())
    try:
      items = self._best.restore(step, args=args)
      intact = state_sums(items["state"]) == items["about"]["sums"]
    except Exception as error:
      raise UserError(self._no_best(step)) from error
    if not intact:
      raise UserError(self._no_best(step))
    _log.info("the release holds the parameters of step %d, the best", step)
    return state._replace(average=items["state"]["average"]), step

  def _no_best(self, step: int) -> str:
    return (
      f"the best checkpoint, {str(self._path / BEST / str(step))!r}, cannot be read: restore it"
      " from a copy, or use a new workdir."
    )

  def restore(self, like: TrainState) -> Restored:
    """The latest checkpoint that can be read.

    One that cannot is passed over, with a warning, and deleted. That repeats steps: with the same
    key, and so bit for bit, and only as long as nothing of them was released, since the keys are
    deleted before that.

    Args:
      like: a state of the same shapes.

    Raises:
      ValueError: if the fingerprint differs, naming each difference; if no checkpoint can be read;
        or if the only ones are older than a release. All files are as before then.
    """
    damaged: list[int] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        restored = self._read(step, like)
      except _Damaged as problem:
        _log.warning("warning: the checkpoint of step %d cannot be read (%s)", step, problem)
        damaged.append(step)
        continue
      if damaged and restored.key is None:
        break
      for later in damaged:
        self._manager.delete(later)
      self._forget_best_after(step)
      return restored
    raise UserError(
      f"of the checkpoints in {str(self._path)!r} none can be read from which the run could go on;"
      " restore the folder from a copy, or use a new workdir."
    )

  def _read(self, step: int, like: TrainState) -> Restored:
    """One checkpoint; ValueError if it is of another run, _Damaged if it is not as it was saved."""
    try:
      # The fingerprint first: a state of other shapes could not be read.
      parts = {"about": ocp.args.JsonRestore(), "fingerprint": ocp.args.JsonRestore()}
      items = self._manager.restore(step, args=ocp.args.Composite(**parts))
      about, fingerprint = dict(items["about"]), items["fingerprint"]
      whole = about.pop("seal", None) == seal(fingerprint, about)
    except Exception as error:
      raise _Damaged(type(error).__name__) from error
    if not whole:
      raise _Damaged("its description was changed")
    differences = compare(fingerprint, self._fingerprint)
    if differences:
      raise UserError(
        f"the checkpoint in {str(self._path)!r} is of another run: {'; '.join(differences)}."
        " Going on would put old noise on new gradients. Use a new workdir."
      )
    state, key = self._read_state(step, like)
    if state_sums(state._replace(noise=())) != about["sums"]:
      raise _Damaged("its arrays were changed")
    if key is not None:
      key = MasterKey(key.secret, about["test_key"])
      if key.digest() != about["key_digest"]:
        raise _Damaged("its key was changed")
    environment = about.get("environment", "an earlier version")
    return Restored(state, key, about["key_digest"], about["test_key"], environment)

  def _read_state(self, step: int, like: TrainState) -> tuple[TrainState, MasterKey | None]:
    public, noise = _parts(like)
    wanted: dict[str, Any] = {"state": ocp.args.StandardRestore(_shapes(public))}
    secret: dict[str, Any] = {}
    has_key = (self._path / str(step) / "keys").exists()
    if has_key:
      secret["keys"] = ocp.args.JsonRestore()
      if noise:
        secret["noise"] = ocp.args.StandardRestore(_shapes(noise))
    try:
      items = self._manager.restore(step, args=ocp.args.Composite(**wanted, **secret))
      key = MasterKey(bytes.fromhex(items["keys"]["secret"])) if has_key else None
      if "noise" in secret:
        like = like._replace(**items["noise"])
        if state_sums(items["noise"]) != items["keys"]["noise_sums"]:
          raise ValueError("what the noise keeps was changed")
      return TrainState(**items["state"], noise=like.noise), key
    except Exception as error:
      if not has_key or step < self._fingerprint["mechanism"]["steps"]:
        raise _Damaged(type(error).__name__) from error
    # After the last step the secrets are only to be deleted, and half of them may be gone already.
    try:
      state = self._manager.restore(step, args=ocp.args.Composite(**wanted))["state"]
      return TrainState(**state, noise=like.noise), None
    except Exception as error:
      raise _Damaged(type(error).__name__) from error

  def _forget_best_after(self, step: int) -> None:
    """Of steps that are about to be repeated: elsewhere they would have other noise."""
    for later in self._best.all_steps() if self._best is not None else ():
      if self._best is not None and later > step:
        self._best.delete(later)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Turns whatever orbax raises into one OSError that says what to do."""
    try:
      yield
    except Exception as error:
      text = " ".join(str(error).split())
      full = "No space left on device" in text
      good = self.latest()
      raise OSError(
        f"cannot write a checkpoint to {str(self._path)!r}: {'the disk is full' if full else text}."
        f" {'None is complete' if good is None else f'That of step {good} is intact'}; make room"
        " and give the same command again."
      ) from error

  def discard(self) -> None:
    """Deletes the checkpoints of a run that may not start."""
    for step in self._manager.all_steps():
      self._manager.delete(step)

  def close(self) -> None:
    """Waits and lets go of the folder."""
    self._manager.close()
    if self._best is not None:
      self._best.close()


def _parts(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
  """A state without what is secret, and that; the second is empty if the noise keeps nothing."""
  public = state._asdict()
  noise = {"noise": public.pop("noise")}
  return public, noise if jax.tree.leaves(noise) else {}


def _shapes(arrays: PyTree) -> PyTree:
  return jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)


class _Damaged(Exception):
  """A checkpoint is not as it was saved."""


def _manager(path: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
  # What was half-written. Orbax would remove it in the background, while the same step is saved.
  for left in path.glob("*.orbax-checkpoint-tmp*") if jax.process_index() == 0 else ():
    shutil.rmtree(left)
  options.enable_async_checkpointing = True
  return ocp.CheckpointManager(path.absolute(), options=options)


def delete_keys(path: Path) -> None:
  """Removes the secret key, and what the noise keeps, once the last step is saved.

  Whoever holds these and the released parameters could take the noise away again. The file is
  removed, not overwritten: what the disk keeps of removed files is beyond this program.
  """
  # Each is moved away whole before it is removed: half of a key could not be read.
  for item in (each for name in _SECRETS for each in path.glob(f"*/{name}")):
    item.rename(path / f"{_REMOVED}{item.parent.name}_{item.name}")
  for removed in path.glob(f"{_REMOVED}*"):
    with contextlib.suppress(FileNotFoundError):
      shutil.rmtree(removed)
