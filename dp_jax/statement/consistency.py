"""Relations between the fields of privacy.json that hold without running an accountant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dp_jax.privacy import shares
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.statement import (
  evaluation_points,
  ledger_check,
  privacy_json,
  sentences,
  statement_items,
)

Record = Mapping[str, Any]

# The calibrated noise reaches the target from below, within this share of it.
TARGET_TOLERANCE = 1e-3
_ROUNDING = 1e-12


def problems(record: Record) -> list[str]:
  """What contradicts itself in a record that the schema accepts; one line each."""
  try:
    mechanism = Mechanism.from_dict(record["mechanism"])
  except (ValueError, TypeError) as error:
    return [f"mechanism: {error}"]
  found = [
    *_digest(record),
    *_copies(mechanism, record),
    *_parts(mechanism, record),
    *_derived(mechanism, record),
    *_target(record),
    *_lists(record),
    *ledger_check.problems(mechanism, record),
  ]
  # Text last: it repeats every number, so it differs whenever something above does.
  return found or list(_texts(record))


def _digest(record: Record) -> Iterator[str]:
  if privacy_json.record_digest(record) != record["digest"]:
    yield "digest is not that of the record: a field was changed"


def _copies(mechanism: Mechanism, record: Record) -> Iterator[str]:
  public = record["treated_as_public"]
  pairs = {
    "sampling": mechanism.sampling.name,
    "sampling_rate": mechanism.sampling.sampling_rate,
    "clip_norm": mechanism.clip_norm,
    "noise_multiplier": mechanism.noise_multiplier,
    "steps": mechanism.steps,
    "adjacency": mechanism.adjacency,
    "max_records_per_unit": public["max_records_per_unit"],
  }
  for name, value in pairs.items():
    if record[name] != value:
      yield f"{name} is {record[name]!r}, but {value!r} where it comes from"
  declared = getattr(mechanism.sampling, "num_units", None)
  if declared is not None and declared != public["num_units"]:
    yield f"num_units is {public['num_units']}, but {declared} in the mechanism"
  secret = mechanism.adjacency == "add_or_remove_one"
  if public["num_units"] is None and not secret:
    yield f"num_units is missing, but it is public under adjacency {mechanism.adjacency}"
  if "records_left_out" in public and record["declared"] != "public":
    yield "records_left_out is stated, but it depends on data that are declared private"
  if public["num_units"] is not None and secret:
    yield "num_units is stated, which breaks the guarantee under adjacency add_or_remove_one"


def _parts(mechanism: Mechanism, record: Record) -> Iterator[str]:
  """The mechanism of a run with several is the one release that they amount to."""
  if "parts" not in record:
    return
  try:
    parts = ledger_check.parts_of(record)
    whole = shares.joint(tuple(parts.values()))
  except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
    yield f"parts: {error}"
    return
  noise = mechanism.noise_multiplier
  if whole != dataclasses.replace(mechanism, noise_multiplier=whole.noise_multiplier):
    yield "mechanism is not the one release that the parts amount to"
  yield from _close("mechanism.noise_multiplier", noise, whole.noise_multiplier)


def _derived(mechanism: Mechanism, record: Record) -> Iterator[str]:
  num_units = record["treated_as_public"]["num_units"]
  try:
    expected = (
      mechanism.declared_batch_size
      if num_units is None
      else mechanism.expected_batch_size(num_units)
    )
  except ValueError as error:
    yield f"expected_batch_size: {error}"
    return
  yield from _close("expected_batch_size", record["expected_batch_size"], expected)
  yield from _close("stddev", record["stddev"], mechanism.stddev)
  quotient = record["stddev"] / record["expected_batch_size"]
  yield from _close("mean_stddev", record["mean_stddev"], quotient)
  parameters = record["parameters"]
  if parameters["trainable"] > parameters["total"]:
    yield "parameters.trainable is more than parameters.total"


def _target(record: Record) -> Iterator[str]:
  target, epsilon = record["target"], record["epsilon"]
  if target["delta"] != record["delta"]:
    yield f"delta is {record['delta']}, but {target['delta']} in the target"
  if epsilon > target["epsilon"]:
    yield f"epsilon is {epsilon}, above the target of {target['epsilon']}"
  elif epsilon < target["epsilon"] * (1 - TARGET_TOLERANCE):
    yield f"epsilon is {epsilon}, more than a thousandth below the target of {target['epsilon']}"


def _lists(record: Record) -> Iterator[str]:
  wanted = [*privacy_json.NOT_COVERED]
  if record["pretrained_weights"] is not None:
    wanted.append(privacy_json.NOT_COVERED_WEIGHTS)
  public = record["treated_as_public"]
  if "public_features" in public:
    wanted.append(privacy_json.NOT_COVERED_FEATURES)
  for item in wanted:
    if item not in record["not_covered"]:
      yield f"not_covered leaves out: {item}"
  for warning in privacy_json.delta_warnings(record["delta"], public["num_units"]):
    if warning not in record["warnings"]:
      yield f"warnings leaves out: {warning}"
  randomness = record["randomness"]
  if randomness["source"] != privacy_json.key_source(randomness["test_key"]):
    yield f"randomness.source is {randomness['source']!r}, which contradicts test_key"
  mechanism = Mechanism.from_dict(record["mechanism"])
  for name, wanted in privacy_json.random_bits(mechanism, "parts" in record).items():
    if randomness[name] != wanted:
      yield f"randomness.{name} is {randomness[name]!r}, but {wanted!r} in this version of dp_jax"
  if record["evaluation"] is not None and record["declared"] != "public":
    yield "evaluation is stated, but it was measured on data that are declared private"
  version = record["software"]["dp-accounting"]
  if record["accountant_version"] != f"dp-accounting {version}":
    yield f"accountant_version is {record['accountant_version']!r}, but software says {version}"


def _texts(record: Record) -> Iterator[str]:
  for name, write in (
    ("statement", sentences.statement),
    ("statement_long", statement_items.statement_long),
    ("nist_sp_800_226", evaluation_points.evaluation_points),
  ):
    if record[name] != write(record):
      yield f"{name} is not what the other fields say"


def _close(name: str, stated: float, derived: float | None) -> Iterator[str]:
  if derived is None or not math.isclose(stated, derived, rel_tol=_ROUNDING):
    yield f"{name} is {stated}, but {derived} where it is derived"
