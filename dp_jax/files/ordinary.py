"""Files that records are in: opened only if they are ordinary ones, and hashed by a sample."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from typing import BinaryIO, cast

import numpy as np

# A hash covers the whole content of files that are together no larger than this, and are no more;
# of others the ends, and some places between them, of some files.
WHOLE_BYTES = 64 * 2**20
_WHOLE_FILES = 4096
_SAMPLED_FILES = 64
_SAMPLED_PLACES = 16
_PIECE = 1024
_AT_ONCE = 2**20

_Path = str | os.PathLike[str]


def open_regular(path: _Path) -> BinaryIO:
  """Opens an ordinary file for reading; never waits for one.

  Raises:
    OSError: if it cannot be opened; EINVAL if it is a pipe, a socket, a device or a folder.
    ValueError: if no file can have such a name.
  """
  return cast(BinaryIO, open(path, "rb", opener=_regular))


def _regular(path: str, flags: int) -> int:
  # Opening a pipe would wait for somebody who writes to it.
  descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no ordinary file")
  return descriptor


def sizes_of(paths: Iterable[_Path]) -> list[int]:
  """The size of each file in bytes; -1 for what is not there, or no ordinary file."""
  return [_size(path) for path in paths]


def _size(path: _Path) -> int:
  try:
    found = os.stat(path)
  except (OSError, ValueError):
    return -1
  return found.st_size if stat.S_ISREG(found.st_mode) else -1


def sample_digest(paths: Sequence[_Path], sizes: Sequence[int]) -> str:
  """SHA-256 over sizes, and over the content: all of it, or a fixed sample of large data.

  Of more than 64 MiB, or more than 4,096 files, 64 files are sampled that are spread evenly, the
  first and the last among them: the first and last KiB of each, and 14 places between. What
  cannot be read counts as empty.

  Args:
    paths: the files, in an order of their own. Their names are not hashed.
    sizes: of each, in bytes, as `sizes_of` gives them.
  """
  digest = hashlib.sha256(np.asarray(sizes, np.int64).tobytes())
  whole = sum(max(size, 0) for size in sizes) <= WHOLE_BYTES and len(paths) <= _WHOLE_FILES
  chosen = range(len(paths)) if whole else _spread(len(paths), _SAMPLED_FILES)
  for at in chosen:
    if sizes[at] <= 0:
      continue
    try:
      with open_regular(paths[at]) as file:
        _add(digest, file, sizes[at], whole)
    except (OSError, ValueError):
      digest.update(b"unreadable")
  return digest.hexdigest()


def _add(digest: hashlib._Hash, file: BinaryIO, size: int, whole: bool) -> None:
  if whole:
    while content := file.read(_AT_ONCE):
      digest.update(content)
    return
  for start in _spread(max(size - _PIECE, 0) + 1, _SAMPLED_PLACES):
    file.seek(start)
    digest.update(file.read(_PIECE))


def _spread(count: int, most: int) -> list[int]:
  """At most so many of 0..count - 1, evenly spread, with both ends."""
  if not count:
    return []
  return sorted({i * (count - 1) // max(most - 1, 1) for i in range(most)})
