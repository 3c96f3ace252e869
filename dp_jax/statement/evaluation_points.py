"""What a run has to say to each point by which NIST SP 800-226 evaluates a guarantee.

The guidelines order the points as a pyramid: the parameters and the unit on top, the algorithm with
its utility and bias beneath, and at the bottom what surrounds the algorithm. A guarantee is worth
no more than the weakest of them, so those that this record cannot vouch for say so.

Near, Darais, Lefkovitz, Howarth 2025, NIST SP 800-226, doi:10.6028/NIST.SP.800-226.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dp_jax.statement import formatting, sentences, unit_words

Record = Mapping[str, Any]

TITLES = {
  "privacy_parameters": "Privacy parameters",
  "unit_of_privacy": "Unit of privacy",
  "other_releases": "Other releases of the same data",
  "algorithm_and_correctness": "Algorithm and correctness",
  "auditing": "Empirical audit",
  "utility": "Utility",
  "bias": "Bias",
  "query_model": "Query model",
  "trust_model": "Trust model",
  "threat_model": "Threat model",
  "implementation_and_side_channels": "Implementation and side channels",
  "tuning": "Tuning of hyperparameters",
  "security_and_access_control": "Data security and access control",
  "data_collection": "Exposure by collecting the data",
}

# Where a reading of epsilon changes in the guidelines: strong up to the first, doubtful past the
# second.
_STRONG, _DOUBTFUL = 1.0, 10.0
_ROUNDING = 1e-12


def evaluation_points(record: Record) -> dict[str, str]:
  """The `nist_sp_800_226` field of privacy.json: evaluation point to a text about this run.

  Args:
    record: the content of privacy.json, as far as the statement reads it.

  Returns:
    One plain text for each key of TITLES, in their order; a function of the record alone.
  """
  return {
    "privacy_parameters": _parameters(record),
    "unit_of_privacy": _unit(record),
    "other_releases": _other_releases(record),
    "algorithm_and_correctness": _algorithm(record),
    "auditing": (
      "No attack was run against the model for this record. Its numbers are proved bounds, which "
      "“python -m dp_jax verify” derives anew; an audit could refute them, not confirm "
      "them."
    ),
    "utility": _utility(record),
    "bias": _bias(record),
    "query_model": _query_model(record),
    "trust_model": (
      "Central: the party that trained holds the data in the clear and is trusted with them. "
      "Those who receive the release need not be."
    ),
    "threat_model": _threat(record),
    "implementation_and_side_channels": _implementation(record),
    "tuning": _tuning(record),
    "security_and_access_control": (
      "The guarantee is void for whoever can read the data, the master key, or the folders "
      "private/ and checkpoints/ of the run. dp_jax makes those folders readable by their owner "
      "alone, and deletes the keys when a run completes; how the machine, its backups and the data "
      "themselves are protected is not recorded here."
    ),
    "data_collection": _collection(record),
  }


def titled(points: Mapping[str, str]) -> list[tuple[str, str]]:
  """The points as (title, text), in the order of the guidelines."""
  return [(title, points[name]) for name, title in TITLES.items()]


def _parameters(record: Record) -> str:
  epsilon, delta = record["epsilon"], record["delta"]
  if record["randomness"]["test_key"]:
    head = f"{sentences.NOT_PRIVATE.capitalize()}. With a secret key: epsilon"
  else:
    head = "Epsilon"
  text = (
    f"{head} {formatting.round_up(epsilon)} at delta {formatting.plain(delta)}, approximate "
    f"differential privacy. {_reading(epsilon)}"
  )
  num_units = record["treated_as_public"]["num_units"]
  if num_units is None:
    return (
      f"{text} The number of units is not public, so delta is not compared with one over it here."
    )
  squared = delta * num_units**2
  return (
    f"{text} Delta is {_ratio(delta * num_units)} / N and "
    f"{_ratio(squared)} / N^2, where N = {formatting.count(num_units)} is the "
    f"number of units; the guidelines ask for at most 1 / N^2, which this "
    f"{'meets' if squared <= 1 + _ROUNDING else 'does not meet'}."
  )


def _ratio(value: float) -> str:
  """Rounded up, but for what the product of two doubles is off."""
  return formatting.round_up(float(f"{value:.12g}"), 3)


def _reading(epsilon: float) -> str:
  if epsilon <= _STRONG:
    return "The guidelines set no limit, and take an epsilon of up to about 1 for strong."
  if epsilon < _DOUBTFUL:
    return (
      "The guidelines set no limit; this lies between about 1, up to which they take an epsilon "
      "for strong, and about 10, from which they doubt that it protects much."
    )
  return (
    "The guidelines set no limit, but from about 10 they doubt that an epsilon protects much, "
    "outliers above all; the bounds on an attacker say what this mechanism still allows."
  )


def _unit(record: Record) -> str:
  unit = unit_words.unit_name(record)
  limit = record["max_records_per_unit"]
  held = (
    ", holding one record" if limit == 1 else f", holding up to {formatting.count(limit)} records"
  )
  if unit == unit_words.RECORD_UNIT:
    held = " by itself"
  kind = (
    "Unbounded: neighbours differ by one unit more or less, and their number is protected."
    if record["adjacency"] == "add_or_remove_one"
    else "Bounded: neighbours have the same number of units, which is public."
  )
  return (
    f"One {unit}{held}. {kind} What a person contributes is protected as a whole only "
    f"if all of it lies in one {unit}; across several it is protected as a group, which is weaker."
  )


def _other_releases(record: Record) -> str:
  ledger = record["ledger"]
  if ledger["releases"] == sentences.own_releases(record):
    text = "The ledger of this run holds no other release of the same data."
  else:
    text = (
      f"The ledger holds {formatting.count(ledger['releases'])} releases of the same data, whose "
      f"epsilon together is {formatting.round_up(ledger['epsilon'])} at the same delta."
    )
  return f"{text} What was released without being entered there adds to this and is not known here."


def _algorithm(record: Record) -> str:
  if sentences.is_solver(record):
    algorithm = (
      "Noised statistics: what one unit adds to each of a few sums over all units is bounded, and "
      "each sum gets Gaussian noise before anything else uses it; the head is computed from these"
    )
  else:
    algorithm = (
      "Noisy gradient descent: in each step the gradients of the units are clipped one by one, "
      "summed, and the sum gets Gaussian noise before anything else uses it"
    )
  drawn = (
    ""
    if sentences.is_solver(record)
    else " The sampler that ran and the event that was accounted come from one object."
  )
  return (
    f"{algorithm}. Accounted by "
    f"{sentences.ACCOUNTANTS[record['accountant']]} of {record['accountant_version']}, a library "
    f"that others maintain.{drawn}"
  )


def _query_model(record: Record) -> str:
  own, first = sentences.own_releases(record), "step"
  what = "One release that was"
  if sentences.is_solver(record):
    what = "One release that was" if own == 1 else f"{own} releases that were"
    first = "of them" if own > 1 else "sum"
  return (
    f"{what} planned in advance: the budget was entered in the ledger before the first {first}. "
    "Whoever queries the released model spends nothing further."
  )


def _utility(record: Record) -> str:
  noise = (
    "The statement gives the noise of each sum."
    if sentences.is_solver(record)
    else "The noise on the mean gradient of a step has a standard deviation of "
    f"{formatting.short(record['mean_stddev'])} in each coordinate."
  )
  if record["declared"] == "public":
    return f"{noise} The data were declared public, so report.html may show what was measured."
  return (
    f"{noise} The data were declared private, so measured accuracy stays with those who hold them "
    "and is in no released file."
  )


def _bias(record: Record) -> str:
  shortened = (
    "bounding what a unit adds does bias a sum"
    if sentences.is_solver(record)
    else "clipping shortens large gradients and does bias a step"
  )
  text = f"The noise has mean zero; {shortened}. Both can cost small groups more than large ones."
  if record["declared"] == "public":
    return f"{text} report.html shows the accuracy of each class where it was measured."
  return f"{text} Whether they did is not released; check the groups that matter before use."


def _threat(record: Record) -> str:
  unit = unit_words.unit_name(record)
  known = (
    "The key of this run came from a file: nothing holds against someone who has it. "
    if record["randomness"]["test_key"]
    else ""
  )
  between = "all noised sums" if sentences.is_solver(record) else "every intermediate model"
  return (
    f"{known}The attacker has the release, and may have {between}, the code, this "
    f"record and all data but one {unit}, and use any method short of predicting the random bits. "
    f"They come from {sentences.random_bits(record)}: that they cannot be told from chance without "
    "the key is assumed."
  )


def _implementation(record: Record) -> str:
  return (
    "Arithmetic is on floats: clipping keeps a margin for rounding, the Gaussian draw reaches far "
    f"into its tails, a delta of {formatting.plain(record['tail_delta'])} pays for what it cannot "
    "reach, and the noised sum is rounded to a fixed grid. Timing, memory and the behaviour of the "
    "machine that trained are not covered."
  )


def _tuning(record: Record) -> str:
  chosen = formatting.one_line(record["hyperparameter_selection"], 600).rstrip(".")
  fixed = (
    "The bounds and the shares of the budget were fixed before the first sum"
    if sentences.is_solver(record)
    else "Clip norm, sampling and steps were fixed before the first step"
  )
  return f"{chosen}. {fixed} of this run."


def _collection(record: Record) -> str:
  limit = record["max_records_per_unit"]
  used = "at most one record" if limit == 1 else f"at most {formatting.count(limit)} records"
  unit = unit_words.unit_name(record)
  read = "all records" if unit == unit_words.RECORD_UNIT else f"{used} of each {unit}"
  return (
    f"Training read {read}. Differential privacy limits what "
    "the release tells, not what was collected; whether less would have done is not for this "
    "record to say."
  )
