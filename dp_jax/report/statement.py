"""The privacy statement as text: two sentences, and the full reporting list.

Both are functions of the privacy record alone, so that whoever holds privacy.json can write them
anew and compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dp_jax.privacy import tails
from dp_jax.report import formatting
from dp_jax.report.units import records_used, unit_item, unit_name

Record = Mapping[str, Any]

NOT_PRIVATE = "not private: fixed seed"

PLAIN_STATEMENT = (
  "This model was trained without differential privacy: no gradient was clipped and no noise was "
  "added. Its parameters may reveal single training records, and nothing here limits what an "
  "attacker learns from them."
)

_NEIGHBOURS = {
  "zero_out": "blanking out any one {unit}",
  "add_or_remove_one": "adding or removing any one {unit}",
  "replace_one": "replacing any one {unit} by another",
}

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

ACCOUNTANTS = {
  "pld": "privacy loss distributions",
  "rdp": "Renyi differential privacy",
  "analytic_gaussian": "the exact curve of the Gaussian mechanism",
}


def statement(record: Record) -> str:
  """States the guarantee in two sentences, and a further one for each warning.

  If the ledger holds other releases on the same data too, one more gives the total.

  Args:
    record: the content of privacy.json, as `privacy_record` returns it.

  Returns:
    Plain text. Epsilon is rounded up to four digits. If the noise came from a test key the text
    begins with "not private: fixed seed" and claims nothing.
  """
  if record["randomness"]["test_key"]:
    text = (
      f"{NOT_PRIVATE.capitalize()}. The noise of this run came from a key file given for a test: "
      "whoever holds that file can take the noise away, so these parameters carry no guarantee; "
      f"with a secret key the same mechanism would give {_pair(record)} for each "
      f"{unit_name(record)}."
    )
  else:
    text = f"{_first_sentence(record)} {_second_sentence(record)}"
  warnings = [formatting.one_line(w, 400) for w in record["warnings"]]
  own = len(record.get("parts", (None,)))
  if record["ledger"]["releases"] > own and not record["randomness"]["test_key"]:
    text = f"{text} {_together(record)}"
  return " ".join([text, *(f"Warning: {w}." for w in warnings)])


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


def sampling_phrase(record: Record) -> str:
  """How a step chooses its units, as a clause: "a Poisson sample, ..."."""
  rate = formatting.plain(record["sampling_rate"])
  details = record["mechanism"]["sampling"]
  size = formatting.count(record["expected_batch_size"])
  if record["sampling"] == "full_batch":
    return "all units"
  if record["sampling"] == "poisson":
    return f"a Poisson sample (each unit independently with probability {rate})"
  if record["sampling"] == "truncated_poisson":
    cap = formatting.count(details["cap"])
    return f"a Poisson sample (probability {rate} for each unit) cut to at most {cap} units"
  if record["sampling"] == "fixed_size":
    return f"a uniform sample of {size} units without replacement"
  if record["sampling"] == "stream":
    return f"the next {size} units in a fixed order (no amplification by sampling)"
  raise ValueError(
    f"sampling {record['sampling']!r} is unknown to the statement; use one of full_batch, "
    "poisson, truncated_poisson, fixed_size, stream"
  )


def _pair(record: Record) -> str:
  epsilon = formatting.round_up(record["epsilon"])
  return f"({epsilon}, {formatting.plain(record['delta'])})-differential privacy"


def factor(epsilon: float) -> str:
  """e^epsilon as text, rounded up; past a million only its size is worth stating."""
  if epsilon > math.log(1e6):
    return "more than a million"
  return formatting.round_up(math.exp(epsilon), 3)


def _first_sentence(record: Record) -> str:
  num_units = record["treated_as_public"]["num_units"]
  count = f"; the number of units, {formatting.count(num_units)}, is public" if num_units else ""
  neighbours = _NEIGHBOURS[record["adjacency"]].format(unit=unit_name(record))
  return (
    f"The released parameters satisfy {_pair(record)} for each {unit_name(record)}: {neighbours} "
    f"({record['adjacency'].replace('_', '-')} adjacency{count}) changes the probability of any "
    f"outcome of the training by at most a factor of {factor(record['epsilon'])} "
    f"(e to the epsilon) plus a delta of {formatting.plain(record['delta'])}."
  )


def _second_sentence(record: Record) -> str:
  return (
    f"It covers {_covered(record)}, accounted by {ACCOUNTANTS[record['accountant']]} "
    f"({record['accountant_version']}); it does not cover the choice of hyperparameters, the facts "
    "that were treated as public, other uses of the same data, or anything outside the release."
  )


def _covered(record: Record) -> str:
  """What was released with noise, as a clause."""
  unit = f"{unit_name(record)}{records_used(record)}"
  if "parts" in record:
    return (
      f"these sums over all units, to each of which a {unit} adds at most the bound given and "
      f"Gaussian noise is added: {'; '.join(_part(each) for each in record['parts'])}"
    )
  steps = record["steps"]
  planned = "the one planned step" if steps == 1 else f"all {formatting.count(steps)} planned steps"
  return (
    f"{planned}, {'' if steps == 1 else 'each '}on {sampling_phrase(record)}, with the gradient of "
    f"each {unit} clipped to a norm of {formatting.plain(record['clip_norm'])} and Gaussian noise "
    f"of {formatting.short(record['noise_multiplier'])} times that norm added to the sum"
  )


def _part(part: Mapping[str, Any]) -> str:
  mechanism = part["mechanism"]
  steps = mechanism["steps"]
  return (
    f"{formatting.one_line(part['purpose'])} "
    f"({'once' if steps == 1 else f'{formatting.count(steps)} times'}, bound "
    f"{formatting.plain(mechanism['clip_norm'])}, noise "
    f"{formatting.short(mechanism['noise_multiplier'])} times that)"
  )


def _together(record: Record) -> str:
  ledger = record["ledger"]
  return (
    f"With all {formatting.count(ledger['releases'])} releases in the ledger of these data, the "
    f"total is epsilon {formatting.round_up(ledger['epsilon'])} at the same delta."
  )


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
  releases = record["ledger"]["releases"]
  entries = "one release" if releases == 1 else f"{releases} releases in all"
  weights = record["pretrained_weights"]
  start = (
    f"Training started from public weights ({formatting.one_line(weights)}), whose own training "
    "data are not protected."
    if weights
    else "Training started from random weights."
  )
  features = record["treated_as_public"].get("public_features")
  if features:
    start += (
      " Features were normalised by the statistics of public ones "
      f"({formatting.one_line(features)}), whose records are not protected."
    )
  return (
    f"The training run, as entered in the ledger before its first step ({entries}; the whole "
    f"planned budget, whether or not training stopped early). {start} Not covered: "
    + "; ".join(record["not_covered"])
    + "."
  )


def _output(record: Record) -> str:
  parameters = record["parameters"]
  frozen = (
    "; the others do not depend on the private data"
    if parameters["trainable"] < parameters["total"]
    else ""
  )
  return (
    "The parameters in the release. The guarantee holds for the noised sum of every step, hence "
    "for every intermediate model and the average of all of them too. "
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
  return (
    f"Each step uses {sampling_phrase(record)}; the sampler that ran and the event that was "
    "accounted come from one object. The sum is divided by "
    f"{formatting.plain(record['expected_batch_size'])}, a constant fixed before training, never "
    "by the size of the batch drawn. The Gaussian is sampled in pair arithmetic with a radius "
    f"from {tails.RADIUS_BITS} random bits and rounded to a fixed grid; a delta of "
    f"{formatting.plain(record['tail_delta'])} is set aside for the tails that it cannot reach. "
    f"Random bits: {randomness['generator']} with keys of {randomness['key_bits']} bits, derived "
    f"from a master key of {randomness['master_key_bits']} bits "
    f"({formatting.one_line(randomness['source'])}). Treated as public: {public}."
  )


def _formal(record: Record) -> str:
  target = record["target"]
  head = f"{NOT_PRIVATE}. With a secret key: " if record["randomness"]["test_key"] else ""
  several = " All releases, scaled to one:" if "parts" in record else ""
  return (
    f"{head}epsilon = {formatting.plain(record['epsilon'])} at delta = "
    f"{formatting.plain(record['delta'])}, recomputed at the noise used (target: epsilon "
    f"{formatting.plain(target['epsilon'])}, delta {formatting.plain(target['delta'])}).{several} "
    f"Sampling rate {formatting.plain(record['sampling_rate'])}, "
    f"{formatting.count(record['steps'])} steps, clip norm "
    f"{formatting.plain(record['clip_norm'])}, noise multiplier "
    f"{formatting.plain(record['noise_multiplier'])}, so a noise standard deviation of "
    f"{formatting.plain(record['stddev'])} on the sum and of "
    f"{formatting.plain(record['mean_stddev'])} on its quotient by the divisor."
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
