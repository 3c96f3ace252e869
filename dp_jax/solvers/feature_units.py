"""Features in shards: units of one static shape, read as often as a solver needs them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.data.sources.source import SourceInfo
from dp_jax.errors import UserError
from dp_jax.models.feature_head import Blocks, feature_map

# {"inputs": float[B, K, d], "label": int32[B, K], "record_mask": bool[B, K]}
Units = dict[str, Any]
Shard = tuple[Units, Any]

MEMORY_BUDGET = 2**31


@dataclasses.dataclass(frozen=True)
class FeatureData:
  """Units of features and labels.

  Attributes:
    shards: gives all shards anew at each call, in the same order: (units, mask bool[B]) of one
      static shape, mask False on padding.
    num_features: d.
    num_classes: C; a record with a label outside 0..C-1 counts as zero.
    num_units: the public number that sums are divided by: N, or what is declared for it where N is
      not public.
    declared: whether it was declared, and not counted.
  """

  shards: Callable[[], Iterable[Shard]]
  num_features: int
  num_classes: int
  num_units: float
  declared: bool = False


def array_data(
  features: np.ndarray,
  labels: np.ndarray,
  num_classes: int,
  *,
  record_mask: np.ndarray | None = None,
  shard_size: int = 4096,
  num_units: float | None = None,
) -> FeatureData:
  """Features in memory, or mapped from a file, as data for a solver.

  Args:
    features: float[N, d], a record a unit, or float[N, K, d], up to K records a unit.
    labels: int[N] or int[N, K].
    num_classes: C.
    record_mask: bool[N, K], which records are real; None means all.
    shard_size: units that are on the device at a time; changes rounding alone.
    num_units: the public divisor; None takes N, which is then public.

  Raises:
    ValueError: if the shapes do not fit together, or num_units is not positive.
  """
  if features.ndim == 2:
    features, labels = features[:, None], np.asarray(labels)[:, None]
  shape = features.shape[:2]
  record_mask = np.ones(shape, bool) if record_mask is None else record_mask
  if features.ndim != 3 or labels.shape != shape or record_mask.shape != shape:
    raise UserError(
      f"features {features.shape}, labels {labels.shape} and record_mask {record_mask.shape} do not"
      " fit together: give [N, d] and [N], or [N, K, d], [N, K] and [N, K]."
    )
  if shard_size < 1 or not len(features):
    raise UserError(f"shard_size={shard_size} of {len(features)} units; both must be at least 1.")
  if num_units is not None and not num_units > 0:
    raise UserError(f"num_units={num_units} must be positive: sums are divided by it.")
  size = min(shard_size, len(features))

  def shards() -> Iterator[Shard]:
    for start in range(0, len(features), size):
      part = slice(start, start + size)
      units = {
        "inputs": _padded(features[part], size),
        "label": _padded(np.asarray(labels[part], np.int32), size),
        "record_mask": _padded(record_mask[part], size),
      }
      yield units, np.arange(size) < len(features) - start

  declared = num_units is not None
  divisor = num_units if num_units is not None else len(features)
  return FeatureData(shards, features.shape[2], num_classes, divisor, declared)


class Rows:
  """Normalised rows of some data, kept in memory between passes where they fit.

  Iterating gives (units, mask) like the data's shards, with "inputs" float32[B, K, d] of rows of
  norm 1. A record that is padding, has features that are not finite or a label that is no class is
  all zero, with `record_mask` False: it counts as a record that is not there.
  """

  def __init__(
    self,
    data: FeatureData,
    power: float = 1.0,
    centre: jax.Array | None = None,
    transform: jax.Array | None = None,
    blocks: Blocks = (),
    memory_budget: int = MEMORY_BUDGET,
  ):
    """Sees nothing of the data yet.

    Args:
      data: the features.
      power: see `feature_map`.
      centre: the same; public, or noised before.
      transform: the same.
      blocks: the same.
      memory_budget: bytes of rows that may be kept.
    """
    self._data = data
    self._map = (power, centre, transform, blocks)
    self._budget = memory_budget
    self._kept: list[Shard] | None = None

  @property
  def data(self) -> FeatureData:
    """What the rows are made of."""
    return self._data

  def __iter__(self) -> Iterator[Shard]:
    if self._kept is not None:
      yield from self._kept
      return
    kept: list[Shard] | None = []
    size = 0
    for units, mask in self._data.shards():
      rows = _prepare(units, mask, *self._map, self._data.num_classes), mask
      size += rows[0]["inputs"].nbytes
      if size > self._budget:
        kept = None
      if kept is not None:
        kept.append(rows)
      yield rows
    self._kept = kept


def _padded(x: np.ndarray, size: int) -> np.ndarray:
  return np.pad(x, [(0, size - len(x)), *((0, 0),) * (x.ndim - 1)])


@jax.jit(static_argnames=("power", "blocks", "num_classes"))
def _prepare(
  units: Units, mask: jax.Array, power: float, centre: Any, transform: Any, blocks: Blocks,
  num_classes: int,
) -> Units:  # fmt: skip
  x, labels = units["inputs"], units["label"]
  real = units["record_mask"] & mask[:, None]
  real &= jnp.all(jnp.isfinite(x), axis=-1) & (labels >= 0) & (labels < num_classes)
  x = jnp.where(real[..., None], x, 0)
  rows = feature_map(x.reshape(-1, x.shape[-1]), power, centre, transform, blocks).reshape(x.shape)
  return {
    "inputs": jnp.where(real[..., None], rows, 0.0),
    "label": jnp.where(real, labels, 0),
    "record_mask": real,
  }


def num_features(info: SourceInfo) -> int:
  """The length of a source's vectors; 0 if it declares none."""
  (size,) = info.input_shape or (0,)
  return size


def check_size(called: str, info: SourceInfo, wanted: int) -> None:
  """Refuses vectors of another length than those of a run.

  Raises:
    ValueError: naming both.
  """
  if info.input_shape != (wanted,):
    raise UserError(
      f"{called} has records of shape {info.input_shape}, and the data {(wanted,)}: the same model"
      " must make both."
    )
