"""Features of a frozen public model for every record of a source, in shards on disk."""

import dataclasses
import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dp_jax.data.npy_resume import ResumableShards
from dp_jax.data.records import RecordSpec, complaint
from dp_jax.data.source import Source
from dp_jax.data.units import UnitLoader
from dp_jax.models.backbones import Backbone, load_backbone
from dp_jax.training.config import Config
from dp_jax.training.data import is_strict, open_split
from dp_jax.training.features_config import FeaturesConfig
from dp_jax.training.prepare import record_spec
from dp_jax.training.progress import Progress

# The label, or all labels, of a record that could not be read: it has no weight in training.
BAD_LABEL = -1
# Microbatches that are decoded ahead of the device.
_AHEAD = 2

_log = logging.getLogger(__name__)
_Batch = tuple[dict[str, np.ndarray], np.ndarray]
_Forward = Callable[[np.ndarray], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Extraction:
  """What `prepare_features` found, ready to run.

  Attributes:
    config: the configuration.
    backbone: the frozen model.
    sources: by split.
    spec: what a well-formed record looks like.
    manifest: of the folder that is written.
  """

  config: FeaturesConfig
  backbone: Backbone
  sources: dict[str, Source]
  spec: RecordSpec
  manifest: dict[str, Any]

  @property
  def private(self) -> bool:
    """Features are as private as the records that they are of."""
    return self.config.data.declared == "private"


def prepare_features(config: FeaturesConfig) -> Extraction:
  """Opens data and weights and refuses what does not fit, before anything is written.

  Raises:
    ValueError: if the data, the weights or the columns are not there or do not fit each other.
  """
  data, backbone = config.data, config.backbone
  run = Config(data=data)
  source = open_split(run, data.train_split)
  names = source.info.class_names or None
  sources = {
    data.train_split: source,
    data.eval_split: open_split(run, data.eval_split, class_names=names),
  }
  spec, _ = record_spec(data, source)
  loaded = load_backbone(
    backbone.name, backbone.size, backbone.weights, layers=backbone.layers,
    input_shape=spec.input_shape, value_range=spec.value_range,
    compute_dtype=backbone.compute_dtype,
  )  # fmt: skip
  for each in sources.values():
    _columns(each, backbone.columns)
  manifest = _manifest(config, loaded, sources, spec)
  return Extraction(config, loaded, sources, spec, manifest)


def extract_features(config: FeaturesConfig, out: Path, *, progress: bool = True) -> dict[str, Any]:
  """Writes features of both splits, or goes on where an earlier process was stopped.

  A record that cannot be read has label -1 (of several labels, each) and features of zero: a unit
  that loses it loses nothing else. Of a feature beyond backbone.dtype the largest number that it
  holds is kept. What was wrong is noted beside the shards, which are private too.

  Args:
    config: what to extract.
    out: the folder; new, or left by a process of the same configuration.
    progress: whether to show progress on standard error.

  Returns:
    The manifest.

  Raises:
    ValueError: for anything that does not fit, before anything is written; on public data, or where
      the configuration says strict, also for a malformed record, or a feature beyond
      backbone.dtype.
  """
  extraction = prepare_features(config)
  for warning in extraction.backbone.warnings:
    _log.warning("warning: %s", warning)
  shards = ResumableShards(out, extraction.manifest, private=extraction.private)
  with shards.open():
    if not shards.complete:
      _write_shards(extraction, shards, progress)
      shards.finish()
  return extraction.manifest


def _write_shards(extraction: Extraction, shards: ResumableShards, progress: bool) -> None:
  size = _microbatch_size(extraction.config)
  plan = [
    (split, shard, start, count)
    for split, counts in extraction.manifest["splits"].items()
    for shard, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False))
  ]
  steps = {(split, shard): -(-count // size) for split, shard, _, count in plan}
  done = sum(count for key, count in steps.items() if shards.has(*key))
  bar = Progress(sum(steps.values()), done, size, "features", enabled=progress)
  forward = _forward(extraction)
  for split, shard, start, count in plan:
    if not shards.has(split, shard):
      records = np.arange(start, start + count)
      arrays, problems = _shard(extraction, split, records, forward, bar)
      if problems:
        shards.note(f"{split}_problems_{shard:05d}.json", problems)
      shards.write(split, shard, arrays)
  bar.close()


def _shard(
  extraction: Extraction,
  split: str,
  records: np.ndarray,
  forward: _Forward,
  bar: Progress,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """The arrays of a shard, and what is wrong with which record."""
  data, source = extraction.config.data, extraction.sources[split]
  loader = UnitLoader(source, extraction.spec, strict=is_strict(data))
  size = _microbatch_size(extraction.config)
  features, labels, problems = [], [], {}
  batches = _batches(loader, records, size)
  for start, (units, mask) in zip(range(0, len(records), size), batches, strict=True):
    real = units["record_mask"][mask, 0]
    out, beyond = (np.asarray(array)[mask] for array in forward(units["inputs"][:, 0]))
    for row in np.flatnonzero(beyond & real):
      index = int(records[start + row])
      problems[index] = f"a feature is not within what {out.dtype} holds: set backbone.dtype"
      if is_strict(data):
        raise ValueError(complaint(source, index, problems[index]))
    features.append(np.where(real[:, None], out, np.zeros((), out.dtype)))
    label = units["label"][mask, 0].astype(np.int8 if extraction.spec.multilabel else np.int32)
    label[~real] = BAD_LABEL
    labels.append(label)
    bar.update(None)
  problems |= loader.bad_records
  columns = _columns(source, extraction.config.backbone.columns)
  arrays = {
    "inputs": np.concatenate(features),
    "labels": np.concatenate(labels),
    **{name: column[records] for name, column in columns.items()},
  }
  return arrays, {str(index): problem for index, problem in sorted(problems.items())}


def _batches(loader: UnitLoader, records: np.ndarray, size: int) -> Iterator[_Batch]:
  """Microbatches of one static shape, read on other threads ahead of their use."""
  starts = deque(range(0, len(records), size))
  waiting: deque[Future[_Batch]] = deque()
  with ThreadPoolExecutor(_AHEAD) as pool:
    while starts or waiting:
      while starts and len(waiting) < _AHEAD:
        start = starts.popleft()
        waiting.append(pool.submit(loader.load, records[start : start + size], size))
      yield waiting.popleft().result()


def _forward(extraction: Extraction) -> _Forward:
  """The frozen model over all devices, each with its part of the records.

  It gives features in the dtype that is kept, and bool[N]: which rows it does not hold.
  """
  dtype = jnp.dtype(extraction.config.backbone.dtype)
  mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
  arrays = jax.device_put(extraction.backbone.arrays, whole)

  @jax.jit
  def compiled(arrays: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    features = extraction.backbone.forward(arrays, inputs)
    largest = jnp.asarray(jnp.finfo(dtype).max, features.dtype)
    beyond = ~jnp.all(jnp.abs(features) <= largest, axis=1)
    return jnp.clip(features, -largest, largest).astype(dtype), beyond

  return lambda inputs: compiled(arrays, jax.device_put(inputs, split))


def _microbatch_size(config: FeaturesConfig) -> int:
  """Rounded up, so that every device has as many records."""
  devices = len(jax.devices())
  return -(-config.backbone.microbatch_size // devices) * devices


def _columns(source: Source, names: tuple[str, ...]) -> dict[str, np.ndarray]:
  return {name: np.asarray(source.column(name)) for name in names}


def _manifest(
  config: FeaturesConfig, backbone: Backbone, sources: dict[str, Source], spec: RecordSpec
) -> dict[str, Any]:
  """As the npy source reads it. Everything in it is known before the first record is read."""
  data, per_shard = config.data, config.backbone.records_per_shard
  about = {
    **backbone.preprocessing, "resize": data.resize, "crop_fraction": data.crop_fraction,
    "interpolation": data.interpolation,
  }  # fmt: skip
  counts = {
    split: [min(per_shard, len(source) - start) for start in range(0, len(source), per_shard)]
    for split, source in sources.items()
  }
  return {
    "input_shape": [backbone.num_features],
    "input_dtype": config.backbone.dtype,
    "num_classes": spec.num_classes,
    "class_names": list(sources[data.train_split].info.class_names),
    "value_range": [-1.0, 1.0],
    "columns": sorted(config.backbone.columns),
    "splits": counts,
    "origin": {
      "backbone": {"name": config.backbone.name, "size": config.backbone.size},
      "weights": config.backbone.weights,
      "weights_sha256": backbone.weights_digest,
      "weights_warnings": list(backbone.warnings),
      "preprocessing": about,
      "preprocessing_sha256": _digest(about),
      "source": data.source,
      "source_sha256": {split: _digest(each.fingerprint()) for split, each in sources.items()},
      "declared": data.declared,
      "dp_jax": version("dp_jax"),
    },
  }  # fmt: skip


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
