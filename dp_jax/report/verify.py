"""Checks a release: every file against its hash, every number against where it comes from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_jax.privacy.mechanism import Mechanism
from dp_jax.report import (
  consistency,
  formatting,
  manifest,
  model_card,
  recompute,
  schema,
  statement,
)

RECORD_NAME = "privacy.json"
PARAMETERS_NAME = "params.safetensors"
CARD_NAME = "model_card.md"
FILES = frozenset({RECORD_NAME, PARAMETERS_NAME, CARD_NAME, manifest.NAME})
# A header lists names and shapes; one beyond this is not one of ours.
_MAX_HEADER_BYTES = 64 * 1024 * 1024
# Bytes of a number of each type that safetensors stores.
_BYTES = {
  **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
  **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
  **dict.fromkeys(("U32", "I32", "F32"), 4),
  **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True)
class Verification:
  """What `verify_release` found.

  Attributes:
    problems: one line for each thing that is wrong; empty if the release holds.
    record: the content of privacy.json, None if it could not be read.
  """

  problems: list[str] = field(default_factory=list)
  record: Mapping[str, Any] | None = None

  @property
  def test_key(self) -> bool:
    """Whether the run's key came from a file, so that nothing is guaranteed."""
    return self.record is not None and bool(self.record["randomness"]["test_key"])

  def __str__(self) -> str:
    if self.problems:
      return "\n".join(["rejected:", *(f"- {problem}" for problem in self.problems)])
    if self.record is None:
      return "nothing was checked"
    first = statement.NOT_PRIVATE if self.test_key else "verified: every number was recomputed"
    return "\n".join(
      [
        first,
        f"epsilon {formatting.plain(self.record['epsilon'])}, "
        f"delta {formatting.plain(self.record['delta'])}",
        statement.statement(self.record),
      ]
    )


def verify_release(release: str | os.PathLike[str]) -> Verification:
  """Checks a release folder; needs neither the data nor the code that trained.

  Checks the files (parameters, privacy.json, model card and manifest; each against its hash, no
  links, nothing that the guarantee does not cover), the schema, every number that stands in two
  places, the ledger's chain, the parameters' count and the model card, and then recomputes: epsilon
  with the same accountant (within 1e-6), the two other accountants on either side of it, what the
  sampler's tails cost, what the ledger holds together, and the bounds on an attacker.

  Args:
    release: the folder.

  Returns:
    A Verification; nothing is raised for what the folder holds.
  """
  folder = Path(release)
  problems = manifest.manifest_problems(folder)
  problems += _unknown_files(folder)
  try:
    record = manifest.read_json(folder / RECORD_NAME)
  except ValueError as error:
    return Verification([*problems, str(error)])
  found = schema.problems(record)
  if found:
    return Verification(problems + found)
  problems += consistency.problems(record)
  problems += _parameter_problems(folder / PARAMETERS_NAME, record)
  if not problems:
    problems += _card_problems(folder / CARD_NAME, record)
  if not problems:
    # The costly part, and the only one that runs a mechanism of the file's choosing.
    problems += recompute.problems(Mechanism.from_dict(record["mechanism"]), record)
  return Verification(problems, record)


def _unknown_files(folder: Path) -> list[str]:
  if not folder.is_dir():
    return []
  return [
    f"{name!r} is no part of a release: the guarantee does not cover it"
    for name in sorted(path.name for path in folder.iterdir())
    if name not in FILES
  ]


def _card_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, ValueError) as error:
    return [f"{path.name} cannot be read ({error})"]
  return [
    f"{path.name} does not say what {RECORD_NAME} says: its {name} is missing or changed"
    for name, wanted in model_card.claims(record).items()
    if wanted not in text
  ]


def _parameter_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
  try:
    count = count_parameters(path)
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    return [f"{path.name} cannot be read as safetensors ({error})"]
  stated = record["parameters"]["total"]
  if count != stated:
    return [f"parameters.total is {stated}, but {path.name} holds {count} numbers"]
  return []


def count_parameters(path: Path) -> int:
  """How many numbers a safetensors file holds, by its header, which its size must bear out.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not a safetensors file, or longer or shorter than its header says.
  """
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= _MAX_HEADER_BYTES:
      raise ValueError(f"its header claims {size} bytes")
    header = manifest.parse_json(file.read(size).decode("utf-8"))
    rest = file.seek(0, os.SEEK_END) - 8 - size
  if not isinstance(header, dict):
    raise ValueError("its header is not an object")
  total, end = 0, 0
  tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
  for tensor in sorted(tensors, key=lambda each: each["data_offsets"]):
    number = math.prod(_length(each) for each in tensor["shape"])
    start, stop = tensor["data_offsets"]
    if start != end or stop - start != number * _BYTES[tensor["dtype"]]:
      raise ValueError("shapes, types and offsets in its header do not fit together")
    total, end = total + number, stop
  if end != rest:
    raise ValueError(f"it holds {rest} bytes of numbers, where its header has {end}")
  return total


def _length(value: Any) -> int:
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise ValueError(f"{value!r} is not a length")
  return value
