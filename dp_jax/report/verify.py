"""Checks a release: every file against its hash, every number against where it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_jax.privacy.mechanism import Mechanism
from dp_jax.report import consistency, formatting, manifest, recompute, schema, statement

RECORD_NAME = "privacy.json"
PARAMETERS_NAME = "params.safetensors"
# A header lists names and shapes; one beyond this is not one of ours.
_MAX_HEADER_BYTES = 64 * 1024 * 1024


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

  Checks the manifest (every file, nothing else, no links), the schema, every number that stands
  in two places, the ledger's chain, the parameters' count, and then recomputes: epsilon with the
  same accountant (within 1e-6), the two other accountants on either side of it, what the sampler's
  tails cost and the bounds on an attacker.

  Args:
    release: the folder.

  Returns:
    A Verification; nothing is raised for what the folder holds.
  """
  folder = Path(release)
  problems = manifest.manifest_problems(folder)
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
    # The costly part, and the only one that runs a mechanism of the file's choosing.
    problems += recompute.problems(Mechanism.from_dict(record["mechanism"]), record)
  return Verification(problems, record)


def _parameter_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
  try:
    count = count_parameters(path)
  except (OSError, ValueError, KeyError, TypeError) as error:
    return [f"{path.name} cannot be read as safetensors ({error})"]
  stated = record["parameters"]["total"]
  if count != stated:
    return [f"parameters.total is {stated}, but {path.name} holds {count} numbers"]
  return []


def count_parameters(path: Path) -> int:
  """How many numbers a safetensors file holds, from its header alone.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not a safetensors file.
  """
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= _MAX_HEADER_BYTES:
      raise ValueError(f"its header claims {size} bytes")
    header = json.loads(file.read(size))
  if not isinstance(header, dict):
    raise ValueError("its header is not an object")
  total = 0
  for name, tensor in header.items():
    if name == "__metadata__":
      continue
    number = 1
    for length in tensor["shape"]:
      number *= int(length)
    total += number
  return total
