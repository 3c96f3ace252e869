"""The privacy statement in two sentences.

It and `statement_items` are functions of the privacy record alone, so that whoever holds
privacy.json can write them anew and compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dp_jax.privacy.sampling.schemes import scheme_of
from dp_jax.statement import formatting
from dp_jax.statement.unit_words import records_used, unit_name

Record = Mapping[str, Any]

NOT_PRIVATE = "not private: fixed seed"

PLAIN_STATEMENT = (
  "This model was trained without differential privacy: no noise was added. Its parameters may "
  "reveal single training records, and nothing here limits what an attacker learns from them."
)

_NEIGHBOURS = {
  "zero_out": "blanking out any one {unit}",
  "add_or_remove_one": "adding or removing any one {unit}",
  "replace_one": "replacing any one {unit} by another",
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
  if record["ledger"]["releases"] > own_releases(record) and not record["randomness"]["test_key"]:
    text = f"{text} {_together(record)}"
  return " ".join([text, *(f"Warning: {w}." for w in warnings)])


def sampling_phrase(record: Record) -> str:
  """How a step chooses its units, as a clause: "a Poisson sample, ..."."""
  details = record["mechanism"]["sampling"]
  counts = {name: formatting.count(n) for name, n in details.items() if isinstance(n, int)}
  rate = formatting.plain(record["sampling_rate"])
  size = formatting.count(record["expected_batch_size"])
  return scheme_of(record["sampling"]).CLAUSE.format(**{**counts, "rate": rate, "size": size})


def sampling_words(record: Record) -> str:
  """The scheme for a list of settings: "poisson sampling at rate 0.25"."""
  words = scheme_of(record["sampling"]).WORDS
  if record["steps"] == 1:
    words = words.removesuffix(" in each step")
  return words.format(rate=formatting.short(record["sampling_rate"]))


def is_solver(record: Record) -> bool:
  """Whether noised sums of a solver were released, in place of the steps of a loop."""
  return "parts" in record


def own_releases(record: Record) -> int:
  """How many entries of the ledger are the run's own."""
  return len(record["parts"]) if is_solver(record) else 1


def steps_phrase(steps: int) -> str:
  """ "1 step", "80 steps"."""
  return "1 step" if steps == 1 else f"{formatting.count(steps)} steps"


def random_bits(record: Record) -> str:
  """The generators and the width of their keys, in words."""
  randomness = record["randomness"]
  noise = f"{randomness['generator']} with keys of {randomness['key_bits']} bits"
  drawn = randomness["sampling"]
  if drawn is None:
    return f"{noise} for the noise (no units are drawn)"
  return (
    f"{noise} for the noise, and {drawn['generator']} with keys of {drawn['key_bits']} bits for the"
    " units of a step"
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
    moved = f"to each of which a {unit} adds at most the bound given and"
    if record["adjacency"] == "replace_one":
      moved = f"each moved by at most twice the bound given by replacing a {unit}, to each of which"
    return (
      f"these sums over all units, {moved} "
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
