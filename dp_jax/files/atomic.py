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
  _replace(path, text.encode("utf-8"), 0o666)


def write_bytes(path: Path, content: bytes) -> None:
  """Writes a file of mode 0600, so that a crash leaves the old or the new one.

  Raises:
    OSError: if the folder cannot be written.
  """
  _replace(path, content, 0o600)


def _replace(path: Path, content: bytes, mode: int) -> None:
  temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
  try:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise
