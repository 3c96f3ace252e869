"""A folder that one process at a time may write to."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from dp_jax.errors import UserError


@contextlib.contextmanager
def held(folder: Path, *, name: str = "", doing: str) -> Iterator[None]:
  """Makes a folder and holds it; the lock ends with the context, or with the process.

  Args:
    folder: to be held.
    name: what messages call it before its path.
    doing: what a process that holds it is doing, as in "writing to".

  Raises:
    ValueError: if it cannot be written, or another process holds it.
  """
  called = f"{name} {str(folder)!r}".strip()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a")  # noqa: SIM115 - held until the context ends
  except OSError as error:
    raise UserError(f"cannot write to {called}: {error.strerror}.") from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(f"another process is {doing} {str(folder)!r}.") from error
    yield
