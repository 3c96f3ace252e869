"""Records that are read before a run reserves its budget: what nothing can be learnt from ends it.

On private data only the first few are, and only that none of them can be used is told: a path or a
column that is wrong is wrong for all records. That the run was not refused is a public fact, and
the statement lists it. On public data, and with data.strict, every record is.
"""

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from dp_jax.data.pipeline import default_workers
from dp_jax.data.records import RecordSpec, complaint, read_records
from dp_jax.data.sources.source import file_of, says_nothing
from dp_jax.data.units import UnitLoader
from dp_jax.errors import UserError
from dp_jax.parallel.hosts import is_process_0
from dp_jax.training.progress import Progress

# How many records of a split are looked at, of those that a unit uses and that have a label.
COUNT = 64
FACT = (
  f"of each split, at least one of the first {COUNT} records that are used and have a label can be"
  " read and, in a table, has a feature within its declared range; else the run would have been"
  " refused"
)
REMINDER = (
  "the data are private, so nothing here says whether there were records that could not be read and"
  " had no weight: private/bad_records.json lists those that were met, if any, and"
  " private/units.json how many were beyond data.max_records_per_unit. Look there."
)
_CHUNK_BYTES = 2**24
_MOST_ROWS = 1024
_SHOWN = 5
# What this process has read in full, so that the runs of a sweep do not repeat it.
_read_in_full: set[tuple[str, str, str, RecordSpec, str]] = set()


def check_first_records(loader: UnitLoader, split: str, *, private: bool) -> None:
  """Refuses a split of which nothing can be used, as far as its first records tell.

  A record cannot be used if it is malformed, has no known label, holds a number that is not
  finite, which would take its unit's gradient away, or is a row of a table without any feature
  within its declared range: its inputs are then declared ones.

  Args:
    loader: of the split; its units say which records are used.
    split: what messages call it, such as "data.train_split='train'".
    private: whether nothing but the fact may be told.

  Raises:
    ValueError: if none of the first records can be used; on private data always the same words.
    OSError: if reading fails for a reason that lies outside the records.
  """
  try:
    found = _first_problem(loader)
  except OSError as error:
    raise _without_file(error) if private else error from None
  if found is None:
    return
  where = (
    "data.path, data.image_root, data.label_columns, data.class_names, data.num_classes,"
    " data.features, data.feature_ranges, privacy.unit and data.units"
  )
  told = (
    f"Which are bad, and why, is not told of private data: compare {where} with it."
    if private
    else f"{found}. Compare {where} with the data."
  )
  raise UserError(
    f"none of the first {COUNT} records of {split} can be used, so nothing could be learnt or"
    f" measured; no budget is spent. {told}"
  )


def check_all_records(
  loaders: list[UnitLoader], where: str, *, shown: bool, progress: bool, limit: int | None = None
) -> None:
  """Reads every record that units use, in threads; each host a share of them.

  Args:
    loaders: the splits; what lies in memory was checked when it was opened.
    where: their file or folder, by which this process knows what it has read.
    shown: whether messages and progress may tell of records: public data.
    progress: whether to show progress on standard error.
    limit: threads; None is one a core.

  Raises:
    ValueError: if there is a malformed one, naming the first few, their files too if `shown`.
  """
  todo = []
  for loader in loaders:
    records = _used(loader)
    # Not by the fingerprint alone: that of many files is of a sample, which two can share.
    digest = hashlib.sha256(records.tobytes()).hexdigest()
    key = (where, loader.source_info.name, loader.source.fingerprint(), loader.spec, digest)
    if loader.source_info.read_on_demand and key not in _read_in_full:
      todo.append((key, loader, list(_chunks(records, loader))))
  if not todo:
    return
  counts = [len(chunks) for *_, chunks in todo]
  size = max(len(chunk) for *_, chunks in todo for chunk in chunks) if max(counts) else 1
  visible = shown and progress and is_process_0()
  bar = Progress(sum(counts), 0, size, "reading all records", enabled=visible)
  try:
    for key, loader, chunks in todo:
      _check_all(loader, chunks, limit, bar, shown)
      _read_in_full.add(key)
  except OSError as error:
    raise error if shown else _without_file(error) from None
  finally:
    bar.close()


def _check_all(
  loader: UnitLoader, chunks: list[np.ndarray], limit: int | None, bar: Progress, shown: bool
) -> None:
  source, spec, problems = loader.source, loader.spec, dict[int, str]()
  workers = limit or default_workers(loader.source_info) or 1
  with ThreadPoolExecutor(workers) as pool:
    try:
      for found in pool.map(lambda chunk: read_records(source, chunk, spec)[-1], chunks):
        problems |= found
        bar.update(None)
    finally:
      pool.shutdown(cancel_futures=True)
  if not problems:
    return
  lines = []
  for index, problem in itertools.islice(sorted(problems.items()), _SHOWN):
    file = file_of(source, index) if shown else ""
    line = complaint(source, index, problem, show=shown).rstrip(".")
    lines.append(line + (f" ({file})" if file else ""))
  more = len(problems) - len(lines)
  raise UserError(
    f"{'; '.join(lines)}{f'; and {more:,} more' if more else ''}. No budget is spent: mend or"
    " remove them, and give the same command again."
  )


def _without_file(error: OSError) -> OSError:
  """The same without the name of a file, which can tell of a person."""
  return OSError(error.errno, f"a record cannot be read: {error.strerror}")


def _first_problem(loader: UnitLoader) -> str | None:
  """None if one of the first records can be used, else what is wrong with one of them."""
  records, examined, first = _used(loader), 0, ""
  if not len(records):
    return "No record belongs to a unit"
  source, spec = loader.source, loader.spec
  for start in range(0, len(records), COUNT):
    indices = records[start : start + COUNT]
    values, usable, problems = read_records(source, indices, spec)
    known = spec.known(values)
    for row, index in enumerate(map(int, indices)):
      if not usable[row] and index not in problems:  # a label to be ignored, by a declared rule
        continue
      nothing = says_nothing(source, index)
      if usable[row] and known[row] and not nothing:
        return None
      problem = problems.get(index) or (
        "no feature has a value within its declared range" if known[row] else "no label is known"
      )
      # Shown of public data alone, by the caller.
      first = first or complaint(source, index, problem, show=True)
      examined += 1
      if examined == COUNT:
        return first
  return first or "Every label is to be ignored, as data.uncertain and data.blank say"


def _used(loader: UnitLoader) -> np.ndarray:
  """int64[n], ascending: the records that a unit uses."""
  members = loader.members
  return np.sort(members[members >= 0])


def _chunks(records: np.ndarray, loader: UnitLoader) -> Iterator[np.ndarray]:
  """This host's share of the records, in pieces of some megabytes."""
  mine = records[jax.process_index() :: jax.process_count()]
  rows = max(1, min(_MOST_ROWS, _CHUNK_BYTES // loader.spec.nbytes(loader.source_info)))
  for start in range(0, len(mine), rows):
    yield mine[start : start + rows]
