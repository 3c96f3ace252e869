"""What of a checkpoint would take the noise away again: deleted when the last step is saved."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import jax

# The field of `TrainState`, and the item of a checkpoint, that hold what the noise remembers.
NOISE = "noise"
_ITEMS = ("keys", NOISE)
# Items on their way out; orbax does not take the name for that of a checkpoint.
_REMOVED = ".removed_"


def remembers(state: Any) -> bool:
  """Whether the noise of a run keeps anything from one step to the next."""
  return bool(jax.tree.leaves(state.noise))


def delete_keys(path: Path) -> None:
  """Removes the secret key, and what the noise remembers, from every checkpoint.

  Once the last step is saved: whoever holds it and the released parameters could take the noise
  away again. Files are removed, not overwritten: what the disk keeps of removed files is beyond
  this program.
  """
  # The key goes last, each moved away whole before it is removed: half of a key could not be read,
  # and a key without what the noise remembers could not go on.
  for item in reversed(_ITEMS):
    for secret in path.glob(f"*/{item}"):
      secret.rename(path / f"{_REMOVED}{item}_{secret.parent.name}")
  for removed in path.glob(f"{_REMOVED}*"):
    with contextlib.suppress(FileNotFoundError):
      shutil.rmtree(removed)
