"""Checks a release: every file against its hash, every number against where it comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_jax.statement import (
  formatting,
  manifest,
  model_card,
  privacy_json,
  rebuild,
  schema,
  sentences,
  weights_header,
)

RECORD_NAME = "privacy.json"
PARAMETERS_NAME = "params.safetensors"
CARD_NAME = "model_card.md"
# What a release says and nothing in it can show, by the field: whoever writes another release with
# other values there, and everything else to fit, is not found out.
TAKEN_ON_TRUST = {
  "": "that the run did what this record says, on the data that it names",
  "declared": "what the data were declared to be",
  "target": "the target, which the noise meets to a thousandth",
  "treated_as_public": "what was treated as public, where the parameters do not say it too",
  "max_records_per_unit": "what was treated as public, where the parameters do not say it too",
  "pretrained_weights": "what the header of the parameters says of the weights that they came from",
  "hyperparameter_selection": "how hyperparameters were chosen",
  "parameters.trainable": "how many of the parameters were trained",
  "evaluation": "the accuracy that was measured on public data",
  "software": "the versions of the software",
  "warnings": (
    "what the warnings say, and that none was left out, but for those on delta and on starting"
    " weights"
  ),
  "not_covered": "what is said not to be covered beyond the usual, and that nothing was left out",
}
FILES = frozenset({RECORD_NAME, PARAMETERS_NAME, CARD_NAME, manifest.NAME})


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
    first = sentences.NOT_PRIVATE if self.test_key else "verified: every number was recomputed"
    return "\n".join(
      [
        first,
        f"epsilon {formatting.plain(self.record['epsilon'])}, "
        f"delta {formatting.plain(self.record['delta'])}",
        sentences.statement(self.record),
        "taken on trust:",
        *(f"- {what}" for what in dict.fromkeys(TAKEN_ON_TRUST.values())),
      ]
    )


def verify_release(release: str | os.PathLike[str]) -> Verification:
  """Checks a release folder; needs neither the data nor the code that trained.

  Checks the files (parameters, privacy.json, model card and manifest; each against its hash, no
  links, nothing that the guarantee does not cover), the schema, the ledger's chain, the parameters'
  header and the model card, and then writes the record anew from its primary facts: epsilon with
  the same accountant (within 1e-6), the two other accountants on either side of it, what the
  sampler's tails cost, and the bounds on an attacker.

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
  if privacy_json.is_earlier(record):
    return Verification([*problems, privacy_json.EARLIER])
  found = schema.problems(record)
  if found:
    return Verification(problems + found)
  problems += rebuild.contradictions(record)
  problems += weights_header.problems(folder / PARAMETERS_NAME, record)
  if not problems:
    problems += _card_problems(folder / CARD_NAME, record)
  if not problems:
    # The costly part, and the only one that runs a mechanism of the file's choosing.
    problems += rebuild.differences(record)
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
  """The whole card is a function of the record: nothing else may stand in it."""
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, ValueError) as error:
    return [f"{path.name} cannot be read ({error})"]
  if text == model_card.model_card(record):
    return []
  return [f"{path.name} is not what {RECORD_NAME} says: something in it is missing or changed"]
