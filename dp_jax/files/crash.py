"""How a fault is told: in full, or of private data, whose records a message can carry, in part."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def tell(error: BaseException, *, private: bool, folder: Path | None = None) -> None:
  """Prints what went wrong on standard error.

  Args:
    error: what was raised, and is no `UserError`.
    private: whether the data are private. Then the type and the place in the code are printed, and
      the rest is written to a file that the owner alone can read.
    folder: the work directory, for its private/crash.txt; without it, a new folder is made.
  """
  if not private:
    traceback.print_exception(error)
    return
  text = "".join(traceback.format_exception(error))
  try:
    path = _write(folder, text)
    rest = f"The rest is in {str(path)!r}, which may hold what records hold."
  except OSError as problem:
    rest = f"The rest could not be written: {problem.strerror}."
  print(
    f"error: {type(error).__name__} at {_place(error)}, a fault of dp_jax or of a library that it"
    f" calls. {rest}",
    file=sys.stderr,
  )


def _place(error: BaseException) -> str:
  """The innermost place in the code of dp_jax."""
  frames = traceback.extract_tb(error.__traceback__)
  own = [each for each in frames if Path(each.filename).is_relative_to(_PACKAGE)]
  if not own:
    return "a place outside of it"
  last = own[-1]
  return f"dp_jax/{Path(last.filename).relative_to(_PACKAGE).as_posix()}:{last.lineno}"


def _write(folder: Path | None, text: str) -> Path:
  private = None if folder is None else folder / "private"
  if private is None or not private.is_dir():
    private = Path(tempfile.mkdtemp(prefix="dp_jax_"))  # mode 0700
  path = private / "crash.txt"
  path.unlink(missing_ok=True)
  descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
    file.write(text)
  return path
