"""The privacy statement point by point: the full reporting list, from the privacy record alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dp_jax.privacy.accounting import tails
from dp_jax.statement import formatting
from dp_jax.statement.sentences import (
  ACCOUNTANTS,
  NOT_PRIVATE,
  Record,
  is_solver,
  own_releases,
  random_bits,
  sampling_phrase,
  steps_phrase,
)
from dp_jax.statement.unit_words import unit_item, unit_name

_NEIGHBOURS_LONG = {
  "zero_out": (
    "Zero-out: two data sets are neighbours if one {unit} of the one is blank in the other; the "
    "number of units is the same in both and is public"
  ),
  "add_or_remove_one": (
    "Add-or-remove-one: two data sets are neighbours if one holds one {unit} more than the other"
  ),
  "replace_one": (
    "Replace-one: two data sets are neighbours if they differ in the content of one {unit}; the "
    "number of units is the same in both and is public"
  ),
}


def statement_long(record: Record) -> str:
  """The statement point by point, as Ponomareva et al. ask a report to give it.

  Args:
    record: the content of privacy.json.

  Returns:
    Plain text: one heading line and one paragraph for each item, numbers unrounded.

  Ponomareva et al. 2023, arXiv:2303.00654, Section 5.3.3.
  """
  return "\n\n".join(f"{heading}\n{text}" for heading, text in statement_items(record))


def statement_items(record: Record) -> list[tuple[str, str]]:
  """The items of `statement_long` as (heading, text), for a page that lays them out itself."""
  return [
    ("1. Setting", _setting(record)),
    ("2a. Data accesses covered", _accesses(record)),
    ("2b. Output of the mechanism", _output(record)),
    ("2c. Unit of privacy", unit_item(record)),
    ("2d. Adjacency", _NEIGHBOURS_LONG[record["adjacency"]].format(unit=unit_name(record)) + "."),
    ("3a. Accounting", _accounting(record)),
    ("3b. Assumptions of the accounting", _assumptions(record)),
    ("3c. Formal statement", _formal(record)),
    ("3d. Hyperparameters", _hyperparameters(record)),
    ("4. Verification", _verification(record)),
  ]


def _setting(record: Record) -> str:
  data = "public (a benchmark)" if record["declared"] == "public" else "private"
  known = (
    f"{NOT_PRIVATE.capitalize()}; what follows describes the mechanism with a secret key. "
    if record["randomness"]["test_key"]
    else ""
  )
  return (
    f"{known}Central differential privacy: a trusted party holds the data, trains on it, and gives "
    f"out the trained parameters. The training data were declared {data}."
  )


def _accesses(record: Record) -> str:
  own, releases = own_releases(record), record["ledger"]["releases"]
  entries = "one release" if own == 1 else f"{own} releases"
  if releases > own:
    entries += f" of its own, {releases} with those of other runs"
  covered = (
    "The sums that the solver released, as entered in the ledger before the first of them "
    f"({entries})"
    if is_solver(record)
    else f"The training run, as entered in the ledger before its first step ({entries}; the whole "
    "planned budget, whether or not training stopped early)"
  )
  weights = record["pretrained_weights"]
  start = (
    f"Training started from public weights ({formatting.one_line(weights)}), whose own training "
    "data are not protected."
    if weights
    else "The head was solved for, from no weights."
    if is_solver(record)
    else "Training started from random weights."
  )
  features = record["treated_as_public"].get("public_features")
  if features:
    start += (
      " Features were normalised by the statistics of public ones "
      f"({formatting.one_line(features)}), whose records are not protected."
    )
  return f"{covered}. {start} Not covered: " + "; ".join(record["not_covered"]) + "."


def _output(record: Record) -> str:
  parameters = record["parameters"]
  frozen = (
    "; the others do not depend on the private data"
    if parameters["trainable"] < parameters["total"]
    else ""
  )
  holds = (
    "for all noised sums together, hence for whatever is computed from them"
    if is_solver(record)
    else "for the noised sum of every step, hence for every intermediate model and the average of "
    "all of them too"
  )
  return (
    f"The parameters in the release. The guarantee holds {holds}. "
    f"{formatting.count(parameters['trainable'])} of {formatting.count(parameters['total'])} "
    f"parameters were trained{frozen}."
  )


def _accounting(record: Record) -> str:
  cross = record["cross_check"]
  bounds = ""
  if cross["optimistic_pld_epsilon"] is not None:
    low = formatting.plain(cross["optimistic_pld_epsilon"])
    bounds += f" A lower bound by the same method, rounded the other way, is {low}."
  if cross["rdp_epsilon"] is not None:
    bounds += f" Renyi accounting gives {formatting.plain(cross['rdp_epsilon'])}."
  return (
    f"{ACCOUNTANTS[record['accountant']].capitalize()} ({record['accountant']}), "
    f"{record['accountant_version']}: {formatting.one_line(record['accountant_reason'], 400)}."
    f"{bounds}"
  )


def _assumptions(record: Record) -> str:
  public = "; ".join(
    f"{formatting.one_line(name)}: {formatting.one_line(_value(value))}"
    for name, value in sorted(record["treated_as_public"].items())
    if value is not None
  )
  randomness = record["randomness"]
  drawn = (
    "Each sum is over all units. Sums are"
    if is_solver(record)
    else f"Each step uses {sampling_phrase(record)}; the sampler that ran and the event that was "
    "accounted come from one object. The sum is"
  )
  counted = "the number of units read" if is_solver(record) else "the size of the batch drawn"
  return (
    f"{drawn} divided by "
    f"{formatting.plain(record['expected_batch_size'])}, a constant fixed before training, never "
    f"by {counted}. The Gaussian is sampled in pair arithmetic with a radius "
    f"from {tails.RADIUS_BITS} random bits and rounded to a fixed grid; a delta of "
    f"{formatting.plain(record['tail_delta'])} is set aside for the tails that it cannot reach. "
    f"Random bits: {random_bits(record)}, derived "
    f"from a master key of {randomness['master_key_bits']} bits "
    f"({formatting.one_line(randomness['source'])}). Treated as public: {public}."
  )


def _formal(record: Record) -> str:
  target = record["target"]
  head = f"{NOT_PRIVATE}. With a secret key: " if record["randomness"]["test_key"] else ""
  if is_solver(record):
    noise = (
      "All releases together are as private as one of noise multiplier "
      f"{formatting.plain(record['noise_multiplier'])}, each in units of its bound"
    )
  else:
    noise = (
      f"Sampling rate {formatting.plain(record['sampling_rate'])}, "
      f"{steps_phrase(record['steps'])}, "
      f"clip norm {formatting.plain(record['clip_norm'])}, noise multiplier "
      f"{formatting.plain(record['noise_multiplier'])}, so a noise standard deviation of "
      f"{formatting.plain(record['stddev'])} on the sum and of "
      f"{formatting.plain(record['mean_stddev'])} on its quotient by the divisor"
    )
  return (
    f"{head}epsilon = {formatting.plain(record['epsilon'])} at delta = "
    f"{formatting.plain(record['delta'])}, recomputed at the noise used (target: epsilon "
    f"{formatting.plain(target['epsilon'])}, delta {formatting.plain(target['delta'])}). {noise}."
  )


def _hyperparameters(record: Record) -> str:
  text = formatting.one_line(record["hyperparameter_selection"], 600).rstrip(".")
  return f"{text}. Where other runs on the same data guided a choice, their losses add to this one."


def _verification(record: Record) -> str:
  ledger = record["ledger"]
  return (
    "The command “python -m dp_jax verify release/” recomputes the numbers here and checks "
    f"every file against its hash. Ledger: {ledger['count']} "
    f"{'entry' if ledger['count'] == 1 else 'entries'}, head {ledger['head']}, epsilon "
    f"{formatting.plain(ledger['epsilon'])} in all. The code is open "
    "source (Apache 2.0); versions stand in privacy.json."
  )


def _value(value: Any) -> str:
  if isinstance(value, (list, tuple)):
    return ", ".join(_value(item) for item in value)
  if isinstance(value, Mapping):
    return ", ".join(f"{name} {_value(item)}" for name, item in sorted(value.items()))
  if isinstance(value, float):
    return formatting.plain(value)
  return str(value)
