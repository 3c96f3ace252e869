"""How a record becomes the inputs of a model: kept with its weights, and compared where they are
used again. Another order of columns or another range gives another model without any error.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_jax.config.data_config import DataConfig
from dp_jax.config.run_config import Config
from dp_jax.config.sections import plain
from dp_jax.data.sources.source import Source, SourceInfo
from dp_jax.errors import UserError
from dp_jax.files.code import tuples
from dp_jax.models.build import ModelSpec
from dp_jax.models.pretrained import weights
from dp_jax.tasks.opening import SHAPES

# How a file writes that there is no value: another file may write it otherwise.
_MISSING = "missing_values"
# What files of features say of the model that made them.
_MADE_BY = ("weights_sha256", "preprocessing_sha256")
# Keys of a reading that are no keys of the data section.
_SOURCE, _SOURCE_RANGE, _FEATURES_OF, _SPLIT = (
  "source", "value_range_of_the_source", "features_of", "held_out_by",
)  # fmt: skip

_log = logging.getLogger(__name__)


def reading_of(config: Config, source: Source) -> dict[str, Any]:
  """How records become inputs, as JSON values: declared, or of the format; nothing of records."""
  data, info = config.data, source.info
  found: dict[str, Any] = {_SOURCE: data.source, _SOURCE_RANGE: list(info.value_range)}
  found |= _own(data, {})[0]
  if made_by := _made_by(info):
    found[_FEATURES_OF] = made_by
  found[_SPLIT] = _split(config)
  return dict(plain({name: value for name, value in found.items() if value is not None}))


def as_trained(spec: ModelSpec, config: Config) -> Config:
  """The configuration with the reading of a model in the place of what it leaves at the default.

  Args:
    spec: of the model.
    config: says where the records are.

  Raises:
    ValueError: if it says anything else than the model was trained with, naming each difference.
  """
  data, known = config.data, spec.reading
  if not known:
    _log.warning(
      "warning: these weights do not say how records became their inputs (they were written before"
      " that was kept): that the configuration says the same as in training is not checked"
    )
  own, data = _own(data, known)
  wanted = {name: known[name] for name in own if name in known}
  labels = known.get("label_columns") or ()
  if "class_names" in own and spec.task.get("class_names") and len(labels) < 2:
    wanted.setdefault("class_names", list(spec.task["class_names"]))
  shape = {name: spec.task[name] for name in SHAPES if name in spec.task}
  problems, taken = [], {}
  for name, value in plain({**wanted, **shape}).items():
    place = data.options if hasattr(data.options, name) else data
    given, default = plain(getattr(place, name)), plain(getattr(type(place)(), name))
    if given == default:
      taken[name] = value
    elif given != value and name != _MISSING:
      problems.append(f"data.{name} is {given}, and was {value} in training")
  if problems:
    raise UserError(
      f"the configuration does not read records as the model was trained: {'; '.join(problems)}."
      " Leave these keys out: they are taken from the model."
    )
  for warning in _unlike(known, config):
    _log.warning("warning: %s", warning)
  # The shapes are checked by those who open the data.
  new = {name: tuples(value) for name, value in taken.items() if name in wanted}
  common = {_MISSING: new.pop(_MISSING)} if _MISSING in new else {}
  options = dataclasses.replace(data.options, **new)
  return dataclasses.replace(config, data=dataclasses.replace(data, options=options, **common))


def _own(data: DataConfig, known: Mapping[str, Any]) -> tuple[dict[str, Any], DataConfig]:
  """The keys that say how this source reads records, and the section that they are of.

  A table of which neither features nor images are named has those that the model was trained on.
  """
  options = data.options
  unnamed = options.reading().get("image_column") is None and not getattr(options, "features", 1)
  if unnamed and known.get("image_column"):
    images: dict[str, Any] = {"image_column": known["image_column"]}
    options = dataclasses.replace(options, **images)
    data = dataclasses.replace(data, options=options)
  missing = {_MISSING: data.missing_values} if options.READS_TEXT else {}
  return {**options.reading(), **missing}, data


def check_source(spec: ModelSpec, data: DataConfig, info: SourceInfo) -> None:
  """Refuses records of another scale, or made by another model, than those of training.

  Raises:
    ValueError: names both.
  """
  there = spec.reading.get(_SOURCE_RANGE)
  if data.value_range is None and there is not None and list(info.value_range) != list(there):
    raise UserError(
      f"{info.name} has values of the range {list(info.value_range)}, and the model was trained on"
      f" a source of the range {there}: bring them to that range."
    )
  _check_made_by(f"{info.name} was", _made_by(info), spec.reading.get(_FEATURES_OF, {}))


def starting_warnings(config: Config, source: Source) -> tuple[str, ...]:
  """Of model.weights: warns of images that were decoded otherwise.

  Raises:
    ValueError: if they were trained on other columns, on other ranges of them, or on features of
      another model.
  """
  if config.model.weights is None:
    return ()
  there = weights.load(Path(config.model.weights))[0].reading
  here, options = reading_of(config, source), config.data.options
  both = [n for n in (*options.inputs(), *options.decoding()) if n in here and n in there]
  unlike = {
    name: f"data.{name} is {here[name]}, and was {there[name]} for {config.model.weights!r}"
    for name in both
    if here[name] != there[name]
  }
  fatal = [text for name, text in unlike.items() if name in options.inputs()]
  if fatal:
    raise UserError(
      f"model.weights were trained on other inputs: {'; '.join(fatal)}. Declare the same, or start"
      " from other weights."
    )
  what = f"the features of model.weights={config.model.weights!r} were"
  _check_made_by(what, there.get(_FEATURES_OF, {}), here.get(_FEATURES_OF, {}))
  return tuple(text for name, text in unlike.items() if name in options.decoding())


def _check_made_by(what: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
  for name in _MADE_BY:
    if here.get(name) and there.get(name) and here[name] != there[name]:
      raise UserError(
        f"{what} made with {name} {here[name]}, not {there[name]} as in training: features of"
        " another model mean something else. Extract them with the same one."
      )


def _unlike(known: Mapping[str, Any], config: Config) -> list[str]:
  """What cannot be taken from a model, and may be meant."""
  data, found = config.data, []
  if known.get("feature_ranges") and not hasattr(data.options, "feature_ranges"):
    found.append(
      f"the model was trained on columns of a table, in the order {', '.join(known['features'])}:"
      f" that the source {data.source} holds these, scaled alike, is not checked"
    )
  given = plain(data.missing_values)
  if known and data.options.READS_TEXT and given is not None and given != known.get(_MISSING):
    usual = "the usual texts"
    found.append(
      f"data.missing_values is {given}, and was {known.get(_MISSING, usual)} in training: a number"
      " that stands for no value in one of them alone is read as that number in the other"
    )
  there, here = known.get(_SPLIT), _split(config)
  if there is not None and here is not None and here != there:
    found.append(
      f"data.eval_split={data.eval_split!r} is another part of the units than training left out"
      f" (data.eval_fraction, data.seed and privacy.unit were {there}): of the same file, it holds"
      " records that the model was trained on"
    )
  return found


def _made_by(info: SourceInfo) -> dict[str, str]:
  return {name: str(info.origin[name]) for name in _MADE_BY if info.origin.get(name)}


def _split(config: Config) -> list[Any] | None:
  return config.data.options.held_out_by(config.data.seed, config.privacy.unit)
