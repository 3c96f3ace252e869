"""manifest.json: the SHA-256 of every file of a release."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from dp_jax.errors import UserError
from dp_jax.files import atomic

NAME = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Beyond any count of this world, and well inside a double.
_MAX_DIGITS = 19
_DIGEST = re.compile(r"[0-9a-f]{64}")


def write_manifest(release: str | os.PathLike[str]) -> Path:
  """Hashes every file of the release folder into manifest.json; call it last.

  Args:
    release: a folder with plain files only; no links, no folders, no hidden files.

  Returns:
    The path of the manifest.

  Raises:
    ValueError: if the folder holds anything but plain files with plain names.
    OSError: if it cannot be read or written.
  """
  folder = Path(release)
  problems = listing_problems(folder)
  if problems:
    raise UserError(f"{problems[0]}; a release holds plain files and nothing else")
  files = {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name != NAME}
  path = folder / NAME
  atomic.write_text(path, json.dumps(files, indent=2, sort_keys=True) + "\n")
  return path


def read_manifest(release: str | os.PathLike[str]) -> dict[str, str]:
  """The manifest as file name to hexadecimal SHA-256.

  Raises:
    ValueError: if it is missing, is not a JSON object, or names anything but a file of the folder.
  """
  path = Path(release) / NAME
  content = read_json(path)
  for name, digest in content.items():
    if not _FILE_NAME.fullmatch(name) or name == NAME:
      raise UserError(f"{NAME} names {name!r}, which is not the name of a file in a release")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
      raise UserError(f"{NAME} gives no SHA-256 for {name}")
  return content


def manifest_problems(release: str | os.PathLike[str]) -> list[str]:
  """What is wrong with the files of a release: one line for each missing, extra or changed one."""
  folder = Path(release)
  problems = listing_problems(folder)
  if problems:
    return problems
  try:
    stated = read_manifest(folder)
  except ValueError as error:
    return [str(error)]
  present = {p.name for p in folder.iterdir()} - {NAME}
  problems += [
    f"{name} is in {NAME} but not in the release" for name in sorted(set(stated) - present)
  ]
  problems += [
    f"{name} is in the release but not in {NAME}" for name in sorted(present - set(stated))
  ]
  for name in sorted(present & set(stated)):
    if sha256(folder / name) != stated[name]:
      problems.append(f"{name} is not the file that {NAME} was written for: its SHA-256 differs")
  return problems


def listing_problems(folder: Path) -> list[str]:
  """Links, folders, special files and odd names; nothing is opened or followed."""
  try:
    found = sorted(os.scandir(folder), key=lambda entry: entry.name)
  except OSError as error:
    return [f"cannot list {folder} ({error.strerror})"]
  problems = []
  for entry in found:
    if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
      problems.append(f"{entry.name!r} is not a plain file")
    elif not _FILE_NAME.fullmatch(entry.name):
      problems.append(f"{entry.name!r} is not a plain file name")
  return problems


def sha256(path: Path) -> str:
  """The SHA-256 of a file, in hexadecimal."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object, strictly: each key once, finite numbers that a double holds, whole characters.

  Raises:
    ValueError: if the file is missing or is anything else.
  """
  try:
    content = parse_json(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"cannot read {path.name} ({error.strerror})") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path.name} is not strict JSON: {error}") from error
  if not isinstance(content, dict):
    raise UserError(f"{path.name} holds no JSON object")
  return content


def parse_json(text: str) -> Any:
  """Any JSON value, as strictly as `read_json`; ValueError or RecursionError if it is not."""
  content = json.loads(
    text,
    object_pairs_hook=_once,
    parse_constant=_refuse_constant,
    parse_float=_finite,
    parse_int=_integer,
  )
  # Half of a surrogate pair, escaped, is read without complaint and cannot be hashed or printed.
  json.dumps(content, ensure_ascii=False).encode("utf-8")
  return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  content = dict(pairs)
  if len(content) != len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise UserError(f"the key {twice!r} stands twice")
  return content


def _refuse_constant(name: str) -> float:
  raise UserError(f"{name} is not a number")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise UserError(f"{text[:40]} is too large for a number")
  return value


def _integer(text: str) -> int:
  if len(text) > _MAX_DIGITS:
    raise UserError(f"{text[:40]}... is too large for a count")
  return int(text)
