"""Config files: a `ml_collections.ConfigDict` with every key of a run, for files and flags."""

import types
import typing
from typing import Any

from ml_collections import config_dict

from dp_jax.training.config import Config
from dp_jax.training.features_config import FeaturesConfig


def base_features_config() -> config_dict.ConfigDict:
  """All keys of `dp-jax features` at their defaults, as its config files start from."""
  return _section(FeaturesConfig())


def base_config() -> config_dict.ConfigDict:
  """All keys of a run at their defaults, as a config file starts from.

  A key that may be left out is a placeholder of its type, so that
  `--config.privacy.epsilon=2` works whether or not the file sets it.
  """
  return _section(Config())


def _section(section: Any) -> config_dict.ConfigDict:
  result = config_dict.ConfigDict()
  for name, hint in typing.get_type_hints(type(section)).items():
    value = getattr(section, name)
    if hasattr(value, "__dataclass_fields__"):
      result[name] = _section(value)
    elif value is None:
      result[name] = config_dict.placeholder(_placeholder_type(hint))
    else:
      result[name] = value
  return result


def _placeholder_type(hint: Any) -> type:
  (inner,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
  return typing.get_origin(inner) or inner
