"""What the statement says of the unit of privacy: its name, what it holds, what is left out."""

from collections.abc import Mapping
from typing import Any

from dp_jax.statement import formatting

Record = Mapping[str, Any]

# The unit that is no column: each record by itself.
RECORD_UNIT = "record"


def unit_name(record: Record) -> str:
  """What is protected, in words, as one printable line."""
  return formatting.one_line(record["unit"], 60)


def unit_item(record: Record) -> str:
  """The item of the reporting list that says what a unit is."""
  num_units = record["treated_as_public"]["num_units"]
  count = (
    f"There are {formatting.count(num_units)} units."
    if num_units is not None
    else "The number of units is not public."
  )
  held = " by itself" if record["unit"] == RECORD_UNIT else f", with {_held(record)}"
  return (
    f"One {unit_name(record)}{held}. {count} A person with data in several units "
    "is protected as a group of that size, which is weaker."
  )


def _held(record: Record) -> str:
  """What a unit holds; of a column, also what happens to more than K records."""
  limit = record["max_records_per_unit"]
  held = (
    "one record"
    if limit == 1
    else f"at most {formatting.count(limit)} records, whose mean loss is clipped as one"
  )
  left_out = record["treated_as_public"].get("records_left_out")
  number = "how many is not public" if left_out is None else f"{formatting.count(left_out)} in all"
  return (
    f"{held}: all records with the same {unit_name(record)} are one unit, and those beyond this "
    f"limit, in the order of the data, are left out ({number})"
  )


def records_used(record: Record) -> str:
  """For the statement: which records stand for a unit that may have several."""
  if record["unit"] == RECORD_UNIT:
    return ""
  limit = record["max_records_per_unit"]
  used = "its first record" if limit == 1 else f"the mean over its first {limit:,} records"
  return f" ({used}; {_left_out(record)})"


def _left_out(record: Record) -> str:
  """How many records are beyond K, in no more detail than is public."""
  count = record["treated_as_public"].get("records_left_out")
  if count is None:
    return "records beyond are left out"
  return f"{formatting.count(count)} records beyond are left out" if count else "none has more"
