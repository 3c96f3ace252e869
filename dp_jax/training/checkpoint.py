"""Checkpoints by orbax, from which the same command goes on, bit for bit.

Each holds the state, the secret key as an item of its own, whether that key is a test key, and a
fingerprint of what must not change. A resumed run draws the same batches and the same noise. Under
a changed mechanism, model or data that would add old noise to a new gradient, and the difference
of the two would reveal it; so it is refused, with each difference named.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dp_jax.privacy.keys import MasterKey
from dp_jax.training.step import TrainState
from dp_jax.training.workdir import compare


class Checkpoints:
  """The checkpoints of one run.

  Args:
    path: the folder `checkpoints/`.
    keep: how many of the latest to keep.
    fingerprint: what must be the same when the run goes on; JSON values.
  """

  def __init__(self, path: Path, keep: int, fingerprint: Mapping[str, Any]):
    self._path = path
    # As JSON reads it back, so that tuples and lists compare equal.
    self._fingerprint = json.loads(json.dumps(fingerprint))
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
    )
    self._manager = ocp.CheckpointManager(path.absolute(), options=options)

  def latest(self) -> int | None:
    """The step of the latest complete checkpoint."""
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, key: MasterKey) -> None:
    """Saves in the background; a checkpoint counts only once it is complete."""
    items = {
      "state": ocp.args.StandardSave(state._asdict()),
      "keys": ocp.args.JsonSave({"secret": key.secret.hex()}),
      "about": ocp.args.JsonSave({"test_key": key.is_test, "key_digest": key.digest()}),
      "fingerprint": ocp.args.JsonSave(self._fingerprint),
    }
    self._manager.save(step, args=ocp.args.Composite(**items))

  def wait(self) -> None:
    """Returns when what was saved is on disk."""
    self._manager.wait_until_finished()

  def restore(self, like: TrainState) -> tuple[TrainState, MasterKey | None, str, bool]:
    """The latest checkpoint's state and key, the key's digest, and whether it is a test key.

    The key is None once the last step was saved and the keys were deleted.

    Args:
      like: a state of the same shapes.

    Raises:
      ValueError: if the fingerprint differs, naming each difference.
    """
    step = self.latest()
    names = {p.name for p in (self._path / str(step)).iterdir()}
    # The fingerprint first: a state of other shapes could not be read.
    saved = self._manager.restore(
      step, args=ocp.args.Composite(fingerprint=ocp.args.JsonRestore())
    )["fingerprint"]
    differences = compare(saved, self._fingerprint)
    if differences:
      raise ValueError(
        f"the checkpoint in {str(self._path)!r} is of another run: {'; '.join(differences)}."
        " Going on would put old noise on new gradients. Use a new workdir."
      )
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
    wanted = {"state": ocp.args.StandardRestore(shapes), "about": ocp.args.JsonRestore()}
    if "keys" in names:
      wanted["keys"] = ocp.args.JsonRestore()
    items = self._manager.restore(step, args=ocp.args.Composite(**wanted))
    is_test, digest = items["about"]["test_key"], items["about"]["key_digest"]
    key = None
    if "keys" in names:
      key = MasterKey(bytes.fromhex(items["keys"]["secret"]), is_test)
    return TrainState(**items["state"]), key, digest, is_test

  def discard(self) -> None:
    """Deletes the checkpoints of a run that may not start."""
    for step in self._manager.all_steps():
      self._manager.delete(step)

  def close(self) -> None:
    """Waits and lets go of the folder."""
    self._manager.close()


def delete_keys(path: Path) -> None:
  """Removes the secret key from every checkpoint, once the last step is saved.

  Whoever holds it and the released parameters could take the noise away again. The file is
  removed, not overwritten: what the disk keeps of removed files is beyond this program.
  """
  for keys in path.glob("*/keys"):
    with contextlib.suppress(FileNotFoundError):
      shutil.rmtree(keys)
