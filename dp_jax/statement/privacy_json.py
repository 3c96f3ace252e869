"""privacy.json: everything that the guarantee of a release says, as one JSON object.

The record holds no number that a reader has to believe: each is recomputed from the mechanism, or
stands twice, by `dp_jax.statement.verify`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dp_jax.errors import UserError
from dp_jax.privacy import shares
from dp_jax.privacy.master_key import GENERATOR, GENERATOR_KEY_BITS, SECRET_BYTES
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import draws
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.statement import (
  attacker,
  crosscheck,
  evaluation_points,
  formatting,
  ledger_check,
  sentences,
  statement_items,
)

SCHEMA_VERSION = 2
MASTER_KEY_BITS = 8 * SECRET_BYTES
EARLIER = (
  "privacy.json was made by an earlier version of dp_jax: use that version with it, or make the "
  "release again"
)
# In the place of a hash until `bound` gives it.
UNBOUND = "0" * 64

NOT_COVERED = (
  "the choice of hyperparameters, architecture and preprocessing, unless it stands among the "
  "releases",
  "the facts that were treated as public",
  "everything outside the release, such as private/, checkpoints/ and logs",
  "other uses of the same data: their losses add to this one",
  "what can be inferred about someone from the data of others",
  "side channels: timing, memory, and the behaviour of the machine that trained",
  "the difference between arithmetic on floats and on real numbers, beyond the sampler's tails and "
  "its rounding to a grid",
)
HYPERPARAMETERS_NOT_RECORDED = (
  "How they were chosen is not recorded; a choice that these data guided is not covered"
)
NOT_COVERED_WEIGHTS = "the records that the public starting weights were trained on"
NOT_COVERED_FEATURES = "the records that the public features are of"

_PACKAGES = ("dp_jax", "dp-accounting", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")


@dataclass(frozen=True)
class ReleaseFacts:
  """What a finished run knows about itself; `privacy_record` derives the rest.

  Attributes:
    spec: the target.
    mechanism: the one that ran.
    parts: where several mechanisms ran, each by its purpose; `mechanism` is then the one release
      that they amount to.
    ledger_entries: every release, in order, as `Ledger.to_list()` gives them.
    num_units: N where it is public, else None.
    expected_batch_size: the public divisor of the noised sum.
    max_records_per_unit: K.
    trainable_parameters: numbers that were trained.
    total_parameters: numbers in the released file, the trained ones among them.
    declared: "public" or "private", what the training data were declared to be.
    test_key: whether the key came from a file; the run is then not private.
    public_facts: name to JSON value: image shape, class names, value range, whatever else was
      taken as known; `class_names` and `num_classes` are used by the report.
    pretrained_weights: name and SHA-256 of the weights that training started from, else None.
    hyperparameter_selection: how they were chosen, in a sentence.
    warnings: sentences without a full stop, shown in the statement.
  """

  spec: PrivacySpec
  mechanism: Mechanism
  ledger_entries: Sequence[Mapping[str, Any]]
  num_units: int | None
  expected_batch_size: float
  max_records_per_unit: int
  trainable_parameters: int
  total_parameters: int
  declared: str = "private"
  test_key: bool = False
  public_facts: Mapping[str, Any] = field(default_factory=dict)
  pretrained_weights: str | None = None
  hyperparameter_selection: str = HYPERPARAMETERS_NOT_RECORDED
  warnings: tuple[str, ...] = ()
  parts: Mapping[str, Mechanism] = field(default_factory=dict)


def privacy_record(facts: ReleaseFacts) -> dict[str, Any]:
  """The content of privacy.json.

  Args:
    facts: what the run knows.

  Returns:
    A dict of JSON values that the schema accepts; `epsilon` is recomputed at the noise used.

  Raises:
    ValueError: if the facts contradict each other, or the mechanism gives no finite epsilon.
  """
  _check(facts)
  mechanism, delta = facts.mechanism, facts.spec.delta
  parts = facts.parts
  accounted = ledger_check.account_run(mechanism, parts, delta)
  if not math.isfinite(accounted.epsilon):
    raise UserError(
      f"the mechanism (noise_multiplier {mechanism.noise_multiplier}) has no finite epsilon at "
      f"delta {delta}: there is nothing to state; use more noise"
    )
  record: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "declared": facts.declared,
    "epsilon": accounted.epsilon,
    "delta": delta,
    "unit": facts.spec.unit,
    "adjacency": mechanism.adjacency,
    "sampling": mechanism.sampling.name,
    "sampling_rate": mechanism.sampling.sampling_rate,
    "clip_norm": mechanism.clip_norm,
    "noise_multiplier": mechanism.noise_multiplier,
    "stddev": mechanism.stddev,
    "steps": mechanism.steps,
    "expected_batch_size": facts.expected_batch_size,
    "mean_stddev": mechanism.stddev / facts.expected_batch_size,
    "accountant": accounted.accountant,
    "accountant_version": accounted.library_version,
    "accountant_reason": accounted.reason,
    "tail_delta": accounted.tail_delta,
    "cross_check": crosscheck.cross_check(mechanism, delta),
    "target": {"epsilon": facts.spec.epsilon, "delta": facts.spec.delta},
    "mechanism": mechanism.to_dict(),
    **({"parts": ledger_check.parts_section(parts)} if parts else {}),
    "max_records_per_unit": facts.max_records_per_unit,
    "treated_as_public": {
      **facts.public_facts,
      "num_units": facts.num_units,
      "max_records_per_unit": facts.max_records_per_unit,
    },
    "parameters": {
      "sha256": UNBOUND,
      "trainable": facts.trainable_parameters,
      "total": facts.total_parameters,
    },
    "evaluation": None,
    "pretrained_weights": facts.pretrained_weights,
    "hyperparameter_selection": facts.hyperparameter_selection,
    "not_covered": not_covered(facts),
    "releases": [dict(entry) for entry in facts.ledger_entries],
    "ledger": ledger_check.ledger_section(
      mechanism, parts, facts.ledger_entries, accounted.epsilon, delta
    ),
    "attacker": attacker.attacker_section(mechanism, accounted.epsilon, delta),
    "randomness": {
      **random_bits(mechanism, bool(parts)),
      "source": key_source(facts.test_key),
      "test_key": facts.test_key,
    },
    "software": software_versions(),
    "warnings": [*delta_warnings(delta, facts.num_units), *facts.warnings],
  }
  # Through JSON once, so that tuples and numpy numbers are what a reader of the file gets.
  record = json.loads(json.dumps(record, allow_nan=False))
  record["statement"] = sentences.statement(record)
  record["statement_long"] = statement_items.statement_long(record)
  record["nist_sp_800_226"] = evaluation_points.evaluation_points(record)
  record["digest"] = record_digest(record)
  return record


def not_covered(facts: ReleaseFacts) -> list[str]:
  """What the guarantee says nothing of."""
  weights = [NOT_COVERED_WEIGHTS] if facts.pretrained_weights is not None else []
  features = [NOT_COVERED_FEATURES] if "public_features" in facts.public_facts else []
  return [*NOT_COVERED, *weights, *features]


def bound(
  record: Mapping[str, Any], parameters_sha256: str, evaluation: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """A record that names the file of parameters that it is about, with its digest anew.

  Args:
    record: what `privacy_record` returned.
    parameters_sha256: of that file, in hexadecimal.
    evaluation: "split" and "accuracy" of data declared public; of private data there is none.

  Raises:
    ValueError: if an evaluation is given of private data.
  """
  if evaluation is not None and record["declared"] != "public":
    raise UserError("an accuracy on private data is a release of its own: it has no place here")
  parameters = {**record["parameters"], "sha256": parameters_sha256}
  result = {**record, "parameters": parameters, "evaluation": evaluation}
  result["digest"] = record_digest(result)
  return result


def is_earlier(record: Mapping[str, Any]) -> bool:
  """Whether a record is of an earlier schema than this one."""
  return record.get("schema_version") in range(1, SCHEMA_VERSION)


def record_digest(record: Mapping[str, Any]) -> str:
  """The SHA-256 of the canonical JSON of everything in the record but `digest`."""
  content = {name: value for name, value in record.items() if name != "digest"}
  text = json.dumps(
    content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
  )
  return hashlib.sha256(text.encode("utf-8")).hexdigest()


def random_bits(mechanism: Mechanism, is_solver: bool) -> dict[str, Any]:
  """What draws: of the noise, and of the units of a step where any are drawn."""
  drawn = not is_solver and mechanism.sampling.DRAWS
  sampling = {"generator": draws.GENERATOR, "key_bits": draws.GENERATOR_KEY_BITS}
  return {
    "generator": GENERATOR,
    "key_bits": GENERATOR_KEY_BITS,
    "sampling": sampling if drawn else None,
    "master_key_bits": MASTER_KEY_BITS,
  }


def delta_warnings(delta: float, num_units: int | None) -> list[str]:
  """A warning if delta is so large that giving one unit away entirely would satisfy it."""
  if num_units is None or delta < 1 / num_units:
    return []
  return [
    f"delta {formatting.plain(delta)} is not below one over the number of units "
    f"({formatting.count(num_units)}), so the guarantee would allow a whole unit to be published; "
    "choose a smaller delta"
  ]


def key_source(test_key: bool) -> str:
  """Where the master key came from, in words."""
  return "key file given for a test" if test_key else "operating system"


def software_versions() -> dict[str, str]:
  """Versions of what ran, for whoever repeats it; packages that are not installed are left out."""
  found = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def _check(facts: ReleaseFacts) -> None:
  mechanism = facts.mechanism
  if facts.parts and mechanism != shares.joint(tuple(facts.parts.values())):
    raise UserError("the mechanism is not the one release that the parts amount to")
  if mechanism.adjacency != facts.spec.adjacency:
    raise UserError(
      f"the target is for adjacency {facts.spec.adjacency}, the mechanism for "
      f"{mechanism.adjacency}; calibrate the mechanism from this target"
    )
  if facts.declared not in ("public", "private"):
    raise UserError(f"declared is {facts.declared!r}; it must be 'public' or 'private'")
  if "records_left_out" in facts.public_facts and facts.declared != "public":
    raise UserError("records_left_out depends on the data, which are declared private")
  secret = mechanism.adjacency == "add_or_remove_one"
  if facts.num_units is None and not secret:
    raise UserError(f"num_units is None, but it is public under adjacency {mechanism.adjacency}")
  if facts.num_units is not None and secret:
    raise UserError(
      "num_units is given, but under add_or_remove_one to state the number of units is to break "
      "the guarantee; give None, or use adjacency zero_out"
    )
  expected = (
    mechanism.declared_batch_size
    if facts.num_units is None
    else mechanism.expected_batch_size(facts.num_units)
  )
  if expected is None or not math.isclose(expected, facts.expected_batch_size, rel_tol=1e-12):
    raise UserError(
      f"expected_batch_size is {facts.expected_batch_size}, but the mechanism gives {expected} "
      f"for {facts.num_units} units; the divisor must be the public one"
    )
  if not 1 <= facts.trainable_parameters <= facts.total_parameters:
    raise UserError(
      f"trainable_parameters is {facts.trainable_parameters} of {facts.total_parameters}; it must "
      "be between 1 and the total"
    )
