"""Features of a frozen public model for every record of a source, in shards on disk."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.config.run_config import Config, PrivacyConfig
from dp_jax.data.records import RecordSpec, complaint
from dp_jax.data.sources.images import decoding_of
from dp_jax.data.sources.npy_resume import ResumableShards
from dp_jax.data.sources.source import Source, telling
from dp_jax.data.units import UnitLoader
from dp_jax.errors import UserError
from dp_jax.models.pretrained.ancestry import to_list
from dp_jax.models.pretrained.backbones import Backbone, load_backbone
from dp_jax.parallel.hosts import (
  agree,
  broadcast,
  code_version,
  is_process_0,
  on_all_hosts,
  on_process_0,
  stopping_all,
)
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.opening import SHAPES, open_task
from dp_jax.training.agreement import check_shared
from dp_jax.training.progress import Progress
from dp_jax.training.setup.first_records import check_first_records
from dp_jax.training.setup.open_data import is_strict, open_split

# The label, or all labels, of a record that could not be read: it has no weight in training.
BAD_LABEL = -1
# Microbatches that are decoded ahead of the device.
_AHEAD = 2
# How often to look whether other hosts are done.
_LOOK_SECONDS = 0.2

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
  run = Config(data=data, privacy=PrivacyConfig(unit=config.privacy.unit))
  source = open_split(run, data.train_split)
  names = source.info.class_names or None
  sources = {
    data.train_split: source,
    data.eval_split: open_split(run, data.eval_split, class_names=names),
  }
  declared = {name: getattr(data, name) for name in SHAPES}
  task = cast(Classification, open_task("auto", {}, source.info, declared)[0])
  loaded = load_backbone(
    backbone.name, backbone.size, backbone.weights, layers=backbone.layers,
    input_shape=task.input_shape, value_range=task.value_range,
    compute_dtype=backbone.compute_dtype,
  )  # fmt: skip
  with telling(data.declared == "public"):
    for split, each in sources.items():
      _columns(each, config.columns)
      private = data.declared == "private"
      check_first_records(UnitLoader(each, task.record), f"the split {split!r}", private=private)
  manifest = _manifest(config, loaded, sources, task.num_classes)
  return Extraction(config, loaded, sources, task.record, manifest)


def extract_features(config: FeaturesConfig, out: Path, *, progress: bool = True) -> dict[str, Any]:
  """Writes features of both splits, or goes on where an earlier process was stopped.

  A record that cannot be read has label -1 (of several labels, each) and features of zero: a unit
  that loses it loses nothing else. Of a feature beyond backbone.dtype the largest number that it
  holds is kept. What was wrong is noted beside the shards, which are private too.

  Of several hosts, each writes a share of the shards; the first begins and completes the folder,
  which all must see. How many there are may change when the command is given again.

  Args:
    config: what to extract.
    out: the folder; new, or left by processes of the same configuration.
    progress: whether to show progress on standard error.

  Returns:
    The manifest.

  Raises:
    ValueError: for anything that does not fit, before anything is written; on public data, or where
      the configuration says strict, also for a malformed record, or a feature beyond
      backbone.dtype.
  """
  extraction = on_all_hosts(lambda: prepare_features(config))
  _agree(extraction)
  for warning in extraction.backbone.warnings:
    _log.warning("warning: %s", warning)
  shards = ResumableShards(out, extraction.manifest, private=extraction.private)
  with contextlib.ExitStack() as stack:
    on_process_0(lambda: stack.enter_context(shards.open()))
    check_shared(out, "the folder of features")
    if not broadcast(shards.complete):
      with stopping_all(private=extraction.private):
        _write_shards(extraction, shards, progress)
        on_process_0(shards.finish)
  return extraction.manifest


def _agree(extraction: Extraction) -> None:
  """Stops all hosts if one would write other features (P18)."""
  shown = json.loads(json.dumps(extraction.manifest))
  hidden = {
    "the records": [shown.pop("splits"), shown["origin"].pop("source_sha256")],
    "the classes": shown.pop("class_names"),
  }
  agree({**extraction.config.to_dict(), "manifest": shown, "code": code_version()}, hidden)


def _write_shards(extraction: Extraction, shards: ResumableShards, progress: bool) -> None:
  size = _microbatch_size(extraction.config)
  plan = [
    (split, shard, start, count)
    for split, counts in extraction.manifest["splits"].items()
    for shard, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False))
  ]
  steps = {(split, shard): -(-count // size) for split, shard, _, count in plan}
  missing = broadcast([i for i, (*key, _, _) in enumerate(plan) if not shards.has(*key)])
  mine = [plan[i] for i in missing[jax.process_index() :: jax.process_count()]]
  todo = sum(steps[split, shard] for split, shard, _, _ in mine)
  done = sum(steps.values()) - sum(steps[plan[i][:2]] for i in missing)
  bar = Progress(done + todo, done, size, "features", enabled=progress and is_process_0())
  forward = _forward(extraction)
  for split, shard, start, count in mine:
    arrays, problems = _shard(extraction, split, np.arange(start, start + count), forward, bar)
    if problems:
      shards.note(f"{split}_problems_{shard:05d}.json", problems)
    shards.write(split, shard, arrays)
  bar.close()
  # Looked for, not waited for in a collective: those give up long before a slow host is done. If a
  # host is gone, its missing heartbeat ends this one.
  while not all(shards.has(*plan[i][:2]) for i in missing):
    time.sleep(_LOOK_SECONDS)


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
        shown = data.declared == "public"
        raise UserError(complaint(source, index, problems[index], show=shown))
    features.append(np.where(real[:, None], out, np.zeros((), out.dtype)))
    label = units["label"][mask, 0]
    label = label.astype(np.int8 if label.ndim > 1 else np.int32)
    label[~real] = BAD_LABEL
    labels.append(label)
    bar.update(None)
  problems |= loader.bad_records
  columns = _columns(source, extraction.config.columns)
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
  """The frozen model over the devices of this host, each with its part of the records.

  It gives features in the dtype that is kept, and bool[N]: which rows it does not hold.
  """
  dtype = jnp.dtype(extraction.config.backbone.dtype)
  devices = jax.local_devices()
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)
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
  devices = jax.local_device_count()
  return -(-config.backbone.microbatch_size // devices) * devices


def _columns(source: Source, names: tuple[str, ...]) -> dict[str, np.ndarray]:
  return {name: np.asarray(source.column(name)) for name in names}


def _manifest(
  config: FeaturesConfig, backbone: Backbone, sources: dict[str, Source], num_classes: int
) -> dict[str, Any]:
  """As the npy source reads it. Everything in it is known before the first record is read."""
  data, per_shard = config.data, config.backbone.records_per_shard
  about = {**backbone.preprocessing, **decoding_of(data.options)}
  counts = {
    split: [min(per_shard, len(source) - start) for start in range(0, len(source), per_shard)]
    for split, source in sources.items()
  }
  cut = {split: each.info.cut for split, each in sources.items() if each.info.cut}
  return {
    "input_shape": [backbone.num_features],
    "input_dtype": config.backbone.dtype,
    "num_classes": num_classes,
    "class_names": list(sources[data.train_split].info.class_names),
    "value_range": [-1.0, 1.0],
    "columns": sorted(config.columns),
    "splits": counts,
    "origin": {
      "backbone": {"name": config.backbone.name, "size": config.backbone.size},
      "weights": config.backbone.weights,
      "weights_sha256": backbone.weights_digest,
      "weights_warnings": list(backbone.warnings),
      "weights_ancestry": to_list(backbone.lineage),
      "preprocessing": about,
      "preprocessing_sha256": _digest(about),
      "source": data.source,
      "source_sha256": {split: _digest(each.fingerprint()) for split, each in sources.items()},
      "declared": data.declared,
      **({"cut": cut} if cut else {}),
      "dp_jax": version("dp_jax"),
    },
  }  # fmt: skip


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
