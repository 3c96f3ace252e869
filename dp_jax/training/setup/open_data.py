"""From the data section of a configuration to sources, units and groups."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.config.data_config import DataConfig
from dp_jax.config.run_config import Config
from dp_jax.data.group_columns import bands
from dp_jax.data.records import RecordSpec
from dp_jax.data.sources import opening
from dp_jax.data.sources.absent import ABSENT_IDS, absent
from dp_jax.data.sources.custom import GIVEN, as_source
from dp_jax.data.sources.source import Source, telling
from dp_jax.data.unit_ids import RULE, canonical
from dp_jax.data.unit_index import UnitIndex
from dp_jax.data.units import Strict, UnitLoader
from dp_jax.errors import UserError


def open_split(
  config: Config,
  name: str,
  *,
  given: Any = None,
  shapes: Mapping[str, Any] | None = None,
  class_names: tuple[str, ...] | None = None,
  labelled: bool = True,
) -> Source:
  """Opens a split of the configured data.

  Args:
    config: where the records are, and which column holds their units.
    name: of the split.
    given: the records themselves, where a program has them (`as_source`).
    shapes: what a model says of records, in the place of what the configuration leaves out.
    class_names: what data.class_names is by default, so that all splits number classes alike.
    labelled: False does without the labels of a table.

  Raises:
    ValueError: if it is not there or malformed, or is declared public though its files say that
      they were made from private records.
  """
  data = config.data
  context = data.context(config.privacy.unit, shapes or {}, class_names, labelled)
  with telling(data.declared == "public"):
    if given is None:
      source = opening.open_split(data.options, name, context)
    else:
      source = as_source(given, f"{GIVEN}/{name}", context)
  if source.info.private and data.declared == "public":
    raise UserError(
      f"data.declared='public', but the manifest of {data.path!r} says that it was made from data"
      " declared private: set data.declared to 'private', or make the features again from data that"
      " is public."
    )
  return source


def is_strict(data: DataConfig) -> Strict:
  """Whether a malformed record is an error rather than one of zero weight."""
  if data.declared == "public":
    return True
  return "quiet" if data.strict else False


def training_units(config: Config, source: Source, record: RecordSpec) -> UnitLoader:
  """The training records, grouped into what the guarantee protects.

  Raises:
    ValueError: if the source has no column privacy.unit, or the list of units cannot be read, or
      other records decide which are used; on public data, and with data.strict, also if a record
      has no unit.
  """
  data, unit = config.data, config.privacy.unit
  if config.privacy.enabled:
    refuse_cut(config, source)
  with telling(data.declared == "public"):
    ids = None if unit == "record" else source.column(unit)
    units = None if data.units is None or ids is None else _read_units(Path(data.units), ids)
    return UnitLoader(
      source, record, max_records_per_unit=config.max_records_per_unit,
      strict=is_strict(data), unit_ids=ids, units=units, missing_values=data.missing_values,
    )  # fmt: skip


def refuse_cut(config: Config, source: Source) -> None:
  """Refuses records that others let in: one unit less would then move more than itself (P19).

  Raises:
    ValueError: naming the cut, and what to do.
  """
  cut, privacy = source.info.cut, config.privacy
  where = [
    text for holds, text in (
      (privacy.unit != "record", f"privacy.unit={privacy.unit!r}"),
      (privacy.adjacency == "add_or_remove_one", "privacy.adjacency='add_or_remove_one'"),
    ) if holds
  ]  # fmt: skip
  if not cut or not where:
    return
  if cut.endswith("class_names=None"):
    if privacy.adjacency != "add_or_remove_one":
      return  # the statement lists the classes among what is treated as public
    why, fix = "the classes are those that records have", "declare data.class_names"
  else:
    why = "a record that goes lets another one in, so that two change"
    fix = "make the cut in the data themselves"
  other = "" if privacy.unit != "record" else ", or use privacy.adjacency='zero_out'"
  raise UserError(f"{cut} has no place under {' and '.join(where)}: {why}; {fix}{other}.")


def split_warnings(config: Config, source: Source, eval_source: Source) -> tuple[str, ...]:
  """That people are in both splits, on public data: on private data even that is not public."""
  unit = config.privacy.unit
  if unit == "record" or config.data.declared != "public":
    return ()
  try:
    ids = np.intersect1d(canonical(source.column(unit)), canonical(eval_source.column(unit)))
  except ValueError:  # held-out data need not say whose they are
    return ()
  count = int(np.sum(~absent(ids, config.data.missing_values, ABSENT_IDS)))
  if not count:
    return ()
  return (
    f"{count:,} values of {unit} are in both splits: the accuracy on {config.data.eval_split!r} is"
    " in part that on those who were trained on",
  )


def id_warnings(config: Config, loader: UnitLoader) -> tuple[str, ...]:
  """What is odd about the ids of units, on public data: on private data even that is not public."""
  unit, alike = config.privacy.unit, loader.look_alike
  if config.data.declared != "public":
    return ()
  found = []
  if loader.num_respelled:
    found.append(
      f"{loader.num_respelled:,} values of {unit} are not written as they are compared: {RULE}"
    )
  if alike:
    first = " and ".join(repr(each) for each in alike[0][:3])
    found.append(
      f"{sum(map(len, alike)):,} values of {unit} look like others and are units of their own, as"
      f" {first}: if they are one person, that person is protected as several would be"
    )
  return tuple(found)


def check_held_out(config: Config, source: Source, eval_source: Source) -> None:
  """Refuses, before anything is spent, held-out data that an evaluation would stop at.

  Raises:
    ValueError: if a column of data.groups is missing or does not hold one value a record, its
      classes are not those of the training split, or it has the column of units but no ids in it.
  """
  data, unit = config.data, config.privacy.unit
  split = f"data.eval_split={data.eval_split!r}"
  ours, theirs = source.info.class_names, eval_source.info.class_names
  if ours and theirs and tuple(ours) != tuple(theirs):
    raise UserError(f"the classes of {split} are not those of the training split, in its order.")
  for name, groups in read_groups(data, eval_source).items():
    if groups.shape != (len(eval_source),):
      raise UserError(f"column {name!r} of data.groups must hold one value a record in {split}.")
  if unit == "record":
    return
  try:
    ids = eval_source.column(unit)
  except ValueError:  # held-out data need not say whose they are
    return
  try:
    UnitIndex.from_ids(ids, 1, missing_values=data.missing_values)
  except ValueError as error:
    # Not the error itself, which can quote an id.
    public = data.declared == "public"
    told = f" ({error})" if public else ""
    raise UserError(
      f"column {unit!r} of {split} does not say whose each record is{told}: it needs one number or"
      " string for each record, not all of them missing; or leave the column out of that split."
    ) from (error if public else None)


def data_facts(config: Config, loader: UnitLoader) -> dict[str, Any]:
  """What is public of tables and units; how many records were cut off is not, on private data."""
  unit = config.privacy.unit
  facts = config.data.options.facts()
  if unit == "record":
    return facts
  facts["unit_ids"] = RULE
  if config.data.units is not None:
    facts["units"] = f"the values of {unit} on a declared list"
  elif config.privacy.adjacency != "add_or_remove_one":  # else not even their number is public
    facts["units"] = f"which values of {unit} occur in the data"
  if config.data.declared == "public":
    facts["records_left_out"] = loader.num_cut
  return facts


def model_of_features(source: Source) -> tuple[str | None, tuple[str, ...]]:
  """Of features: the weights that made them, and what the statement must say of these."""
  origin = source.info.origin
  digest, said = origin.get("weights_sha256"), origin.get("weights_warnings")
  warnings = tuple(map(str, said)) if isinstance(said, list) else ()
  if not digest:
    return None, warnings
  name = Path(str(origin.get("weights", ""))).name
  return f"{name} sha256 {digest}, of the model that made the features", warnings


def units_digest(data: DataConfig) -> str | None:
  """A hash of the public list of units, if there is one."""
  return None if data.units is None else hashlib.sha256(Path(data.units).read_bytes()).hexdigest()


def read_groups(data: DataConfig, source: Source) -> dict[str, np.ndarray]:
  """The subgroup of every record, [num_records] of strings for each column of data.groups.

  Raises:
    ValueError: if the source lacks a column, or one with cut points holds no numbers.
  """
  cuts = data.group_bins or ((),) * len(data.groups or ())
  with telling(data.declared == "public"):
    return {
      name: bands(_without_missing(source.column(name), data.missing_values), points, name)
      for name, points in zip(data.groups or (), cuts, strict=True)
    }


def _without_missing(values: np.ndarray, missing: tuple[str, ...] | None) -> np.ndarray:
  """Every text of a group is a value, but for what is declared to be none."""
  if missing is None or values.dtype.kind not in "US":
    return values
  none = np.isin(canonical(values), canonical(np.array(missing, np.str_)))
  return np.where(none, "", values.astype(str))


def _read_units(path: Path, ids: np.ndarray) -> np.ndarray:
  """The ids in a file, one a line, as numbers where the column holds numbers."""
  try:
    lines = path.read_text("utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"data.units={str(path)!r} cannot be read: {error}") from error
  listed = canonical(np.array([line.strip() for line in lines if line.strip()]))
  if not len(listed):
    raise UserError(f"data.units={str(path)!r} lists no unit")
  if ids.dtype.kind not in "biuf":
    return listed
  try:
    return listed.astype(ids.dtype)
  except (ValueError, OverflowError) as error:
    raise UserError(
      f"data.units={str(path)!r} lists what is no number, but the column holds numbers: {error}"
    ) from error
