"""Public features: what solver.public_features names, and what a solver takes from them."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dp_jax.config.run_config import Config
from dp_jax.data.records import RecordSpec, read_records
from dp_jax.data.sources.npy_shards import MANIFEST, NpyShards
from dp_jax.data.sources.npz import open_npz
from dp_jax.data.sources.source import Source
from dp_jax.errors import UserError
from dp_jax.models.feature_head import check_blocks
from dp_jax.models.pretrained.ancestry import Lineage, of_features
from dp_jax.solvers.feature_units import FeatureData, Shard, check_size, num_features
from dp_jax.solvers.head import PublicStatistics, public_statistics
from dp_jax.training.setup.open_data import model_of_features
from dp_jax.training.solving import Features

# Rows that are read at a time.
_ROWS = 4096
# What both files must say alike of the model that made them, where both say it.
_SAME_MODEL = ("weights_sha256", "preprocessing_sha256")


@dataclasses.dataclass(frozen=True)
class PublicFeatures:
  """Features that no guarantee protects.

  Attributes:
    statistics: their mean and second moment.
    digest: the sha256 of the file; of a folder, of the lines that `sha256sum` prints for its
      manifest and the files of the split, in order of their names.
    fact: what the statement says of them.
    warnings: what it must say of the weights that made them.
    ancestry: these weights, and all that are behind them.
  """

  statistics: PublicStatistics
  digest: str
  fact: str
  warnings: tuple[str, ...]
  ancestry: Lineage = ()


def read_public_features(
  config: Config, features: Features, sources: Sequence[Source]
) -> PublicFeatures | None:
  """Reads solver.public_features; None if the configuration has none.

  Args:
    config: of the run.
    features: what the records of the run are.
    sources: the splits that the run trains on and evaluates.

  Raises:
    ValueError: if the file is not there, was made from private records or by another model, does
      not have the run's number of features, holds records of the run, or numbers that are not
      finite.
  """
  solver = config.solver
  if solver.public_features is None:
    return None
  path = Path(solver.public_features)
  called = f"solver.public_features={solver.public_features!r}"
  if config.data.path is not None and path.resolve() == Path(config.data.path).resolve():
    raise UserError(f"{called} is data.path: name features of other records, which are public.")
  source: Source
  if path.is_file():
    source = open_npz(str(path), solver.public_split)
  else:
    source = NpyShards(str(path), solver.public_split)
  _check(called, source, features, sources)
  blocks = check_blocks(solver.blocks, features.num_features)
  statistics = public_statistics(_data(called, source), solver.power, blocks)
  if not np.trace(statistics.moment) > 0:
    raise UserError(f"{called} has no two rows that differ: they say nothing of other features.")
  digest = _digest(path, solver.public_split)
  fact = f"sha256 {digest}, split {solver.public_split} of {path.name}"
  behind = of_features(source.info.origin)
  return PublicFeatures(statistics, digest, fact, model_of_features(source)[1], behind)


def _check(called: str, source: Source, features: Features, sources: Sequence[Source]) -> None:
  """Refuses features that are not public, not of the same model, or those of the run itself."""
  info = source.info
  if info.private:
    raise UserError(
      f"{called}: its manifest says that it was made from data declared private, and what is taken"
      " from it would be released without noise: make it from public data."
    )
  check_size(called, info, features.num_features)
  if tuple(info.value_range) != (-1, 1):
    raise UserError(f"{called} has features of the range {info.value_range}, not (-1, 1).")
  for other in sources:
    for name in _SAME_MODEL:
      here, there = info.origin.get(name), other.info.origin.get(name)
      if here and there and here != there:
        raise UserError(
          f"{called} was made with {name} {here}, and {other.info.name} with {there}: the same"
          " model must make both."
        )
    if _same_records(source, other, features.record):
      raise UserError(
        f"{called} holds the records of {other.info.name}: what is taken from it would be released"
        " without noise. Name features of other records, which are public."
      )


def _same_records(public: Source, other: Source, record: RecordSpec) -> bool:
  """Whether both are of the same records, in any order and format.

  By what their manifests say, or else by content: for that both are read, if they are as long.
  """
  if _made_from(public) & _made_from(other):
    return True
  if len(public) != len(other):
    return False
  return _sum_of_hashes(public, record) == _sum_of_hashes(other, record)


def _made_from(source: Source) -> set[str]:
  """Hashes of the images that features are of, as far as the manifest says."""
  found = source.info.origin.get("source_sha256")
  return set(map(str, found.values())) if isinstance(found, dict) else set()


def _sum_of_hashes(source: Source, record: RecordSpec) -> int:
  """The same for the same rows in another order, or in another dtype that holds their values."""
  total = 0
  for indices in _pieces(source):
    values, *_ = read_records(source, indices, record)
    # Zero is added so that it has one sign.
    for row in np.ascontiguousarray(values["inputs"], np.float32) + np.float32(0):
      total += int.from_bytes(hashlib.blake2b(row, digest_size=32).digest())
  return total


def _data(called: str, source: Source) -> FeatureData:
  """The rows as data for a solver. Their labels do not matter."""
  size = num_features(source.info)
  most = min(_ROWS, len(source))

  def shards() -> Iterator[Shard]:
    for indices in _pieces(source):
      gathered = source.gather(indices)
      if not isinstance(gathered, dict):
        raise TypeError(f"{source.info.name} does not stack its records")
      rows = gathered["inputs"]
      bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
      if len(bad):
        raise UserError(f"{called}: record {indices[bad[0]]} has numbers that are not finite.")
      inputs = np.zeros((most, 1, size), rows.dtype)
      inputs[: len(rows), 0] = rows
      labels, real = np.zeros((most, 1), np.int32), np.ones((most, 1), bool)
      units = {"inputs": inputs, "label": labels, "record_mask": real}
      yield units, np.arange(most) < len(rows)

  return FeatureData(shards, size, 1, len(source))


def _pieces(source: Source) -> Iterator[np.ndarray]:
  for start in range(0, len(source), _ROWS):
    yield np.arange(start, min(start + _ROWS, len(source)))


def _digest(path: Path, split: str) -> str:
  if path.is_file():
    return _file_digest(path)
  files = [path / MANIFEST, *path.glob(f"{split}_*.npy")]
  lines = [f"{_file_digest(file)}  {file.name}\n" for file in sorted(files) if file.exists()]
  return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_digest(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
