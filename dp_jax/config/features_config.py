"""The configuration of `dp-jax features`: which data, and which frozen model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dp_jax.config.data_config import DataConfig
from dp_jax.config.sections import from_mapping, plain
from dp_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
  """The frozen model, and how its features are written.

  Attributes:
    name: efficientnet_lite, or the model that the weights file holds.
    size: of efficientnet_lite: lite0 or lite2.
    weights: imagenet (of the extra [backbones]), or a safetensors file of public weights.
    layers: what is averaged over positions and put side by side: pooled (what the head reads), or
      block0, block1, ...
    columns: columns of the source to keep beside the features: ids of people, groups.
    dtype: of the features on disk. What it does not hold (float16: above 65504) is an error on
      public data, or where data.strict is set; else it becomes the largest number that it holds.
    compute_dtype: of the model's activations.
    microbatch_size: records per device call, over all devices of a host.
    records_per_shard: a shard is what is kept when the command is stopped.
  """

  name: str = "efficientnet_lite"
  size: str = "lite0"
  weights: str = "imagenet"
  layers: tuple[str, ...] = ("pooled",)
  columns: tuple[str, ...] = ()
  dtype: Literal["float16", "bfloat16", "float32"] = "float16"
  compute_dtype: Literal["float32", "bfloat16"] = "float32"
  microbatch_size: int = 64
  records_per_shard: int = 8192


@dataclasses.dataclass(frozen=True)
class UnitConfig:
  """Whose the records are.

  Attributes:
    unit: as in a run: "record", or the column by which data.eval_fraction splits. That column is
      kept beside the features, as one of backbone.columns, for privacy.unit of the run on them.
  """

  unit: str = "record"


@dataclasses.dataclass(frozen=True)
class FeaturesConfig:
  """What to extract features from, and with what."""

  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  backbone: BackboneConfig = dataclasses.field(default_factory=BackboneConfig)
  privacy: UnitConfig = dataclasses.field(default_factory=UnitConfig)

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> "FeaturesConfig":
    """Builds and checks a configuration from nested dictionaries.

    Raises:
      ValueError: for an unknown key, a value of the wrong type or out of range; names the key.
    """
    config = from_mapping(cls, values, "config")
    config.data.refuse_others(values.get("data", {}))
    if not config.privacy.unit:
      raise UserError("privacy.unit='' must name a column.")
    for name in ("microbatch_size", "records_per_shard"):
      value = getattr(config.backbone, name)
      if value < 1:
        raise UserError(f"backbone.{name}={value} must be at least 1.")
    return config

  @property
  def columns(self) -> tuple[str, ...]:
    """Those that are kept beside the features: backbone.columns, and that of the unit."""
    unit = self.privacy.unit
    own = () if unit == "record" or unit in self.backbone.columns else (unit,)
    return (*self.backbone.columns, *own)

  def to_dict(self) -> dict[str, Any]:
    """Nested dictionaries, with lists for tuples, as they are read back from JSON."""
    return plain(dataclasses.asdict(self) | {"data": self.data.to_dict()})
