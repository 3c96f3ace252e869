"""Writing a file so that a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_text(path: Path, text: str) -> None:
  """Writes `text` as UTF-8 to `path` through a temporary file beside it and a rename.

  Raises:
    OSError: if the folder cannot be written.
  """
  temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
  try:
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise
