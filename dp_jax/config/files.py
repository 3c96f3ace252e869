"""Config files: a `ml_collections.ConfigDict` with every key of a run, for files and flags."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import config_dict

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.config.run_config import Config
from dp_jax.config.sections import LEFT_OUT, keys_of


def base_features_config() -> config_dict.ConfigDict:
  """All keys of `dp-jax features` at their defaults, as its config files start from."""
  return _section(FeaturesConfig)


def base_config() -> config_dict.ConfigDict:
  """All keys of a run at their defaults, as a config file starts from.

  A key that may be left out is a placeholder of its type, so that
  `--config.privacy.epsilon=2` works whether or not the file sets it.
  """
  return _section(Config)


def _section(cls: Any) -> config_dict.ConfigDict:
  result, keys = config_dict.ConfigDict(), keys_of(cls)
  defaults = keys()
  left_out = {each.name for each in dataclasses.fields(keys) if each.metadata.get(LEFT_OUT)}
  for name, hint in typing.get_type_hints(keys).items():
    if isinstance(getattr(defaults, name), Mapping):
      result[name] = config_dict.ConfigDict()
      continue
    value = None if name in left_out else getattr(defaults, name)
    if dataclasses.is_dataclass(hint):
      result[name] = _section(hint)
    elif value is None:
      result[name] = config_dict.placeholder(_placeholder_type(hint))
    else:
      result[name] = value
  return result


def _placeholder_type(hint: Any) -> type:
  if typing.get_origin(hint) is Literal:
    return str
  if typing.get_origin(hint) in (types.UnionType, typing.Union):
    (inner,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return _placeholder_type(inner)
  return typing.get_origin(hint) or hint
