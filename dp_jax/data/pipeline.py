"""Microbatches: cutting a step's units into them, and loading them ahead of the device.

The units of every step are a function of (key, step), so the microbatches to come are known, and
threads load them while the device computes, across the borders of steps too. What is loaded, and
so the result of the training, is the same with and without.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from dp_jax.data.sources.source import SourceInfo
from dp_jax.data.units import UnitLoader
from dp_jax.errors import UserError


class Microbatch(NamedTuple):
  """Units of one static shape, padded.

  Attributes:
    units: arrays [rows, K, ...], as `UnitLoader.load` returns them.
    mask: bool[rows], False on padding.
    unit_ids: uint32[rows], 0 on padding.
  """

  units: Any
  mask: Any
  unit_ids: Any


Put = Callable[[Microbatch], Microbatch]


def cut(indices: np.ndarray, size: int) -> list[np.ndarray]:
  """Cuts a step's units into microbatches of at most `size`: none for an empty step."""
  return [indices[start : start + size] for start in range(0, len(indices), size)]


def load_microbatch(
  loader: UnitLoader, part: np.ndarray, size: int, rows: np.ndarray | None = None
) -> Microbatch:
  """Loads this process's rows of a microbatch.

  Args:
    loader: the units.
    part: int64[n], the units of the microbatch, n <= size.
    size: what the microbatch is padded to, over all processes.
    rows: int64[m], ascending, the rows of it that this process loads; None means all.

  Raises:
    ValueError: as `UnitLoader.load`.
  """
  rows = np.arange(size) if rows is None else rows
  mine = part[rows[rows < len(part)]]
  units, mask = loader.load(mine, len(rows))
  unit_ids = np.zeros(len(rows), np.uint32)
  unit_ids[: len(mine)] = mine
  return Microbatch(units, mask, unit_ids)


def default_workers(info: SourceInfo) -> int:
  """How many threads load: one a core where records are read from files, none from memory."""
  if not info.read_on_demand:
    return 0
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pipeline:
  """Loads the microbatches of the steps to come, in order, in threads.

  At most `prefetch` of them are loaded or being loaded at a time, whatever the size of a step.
  Use it as a context: leaving it, for whatever reason, ends the threads.
  """

  def __init__(
    self,
    loader: UnitLoader,
    indices: Callable[[int], np.ndarray],
    steps: range,
    size: int,
    *,
    workers: int,
    prefetch: int,
    rows: np.ndarray | None = None,
    put: Put = lambda microbatch: microbatch,
  ):
    """Starts nothing yet: loading begins when the first microbatch is taken.

    Args:
      loader: the units.
      indices: step -> int64[n], the units of a step: the sampler's.
      steps: the steps to come.
      size: units of a microbatch, over all processes.
      workers: threads, at least 1; each loads one microbatch at a time.
      prefetch: microbatches, at least 1; fewer than `workers` would leave threads idle.
      rows: the rows of each microbatch that this process loads, ascending; None means all.
      put: places a microbatch on the devices; called by the threads.

    Raises:
      ValueError: if workers or prefetch is below 1.
    """
    if workers < 1 or prefetch < 1:
      raise UserError(f"workers={workers} and prefetch={prefetch} must be at least 1")
    # Imported here, since it takes a second, and data in memory does without.
    import grain

    def load(part: np.ndarray) -> tuple[np.ndarray, Microbatch]:
      return part, put(load_microbatch(loader, part, size, rows))

    parts = _Parts(indices, steps, size, load)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=prefetch)
    ahead = grain.MapDataset.source(parts).to_iter_dataset(options, allow_nones=True)
    self._ahead: Any = iter(ahead)

  def take(self, part: np.ndarray) -> Microbatch:
    """The next microbatch.

    Args:
      part: its units, which must be those that were loaded.

    Raises:
      RuntimeError: if they are not: then steps were taken in another order than announced.
      Exception: what the thread raised that loaded it.
    """
    loaded = next(self._ahead)
    if loaded is None or not np.array_equal(loaded[0], part):
      raise RuntimeError("the microbatch that was loaded ahead is not that of this step")
    return loaded[1]

  def close(self) -> None:
    """Ends the threads; what they have loaded, or are still loading, is dropped."""
    self._ahead.close()

  def __enter__(self) -> Pipeline:
    """Gives itself."""
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    """Ends the threads."""
    self.close()


def in_order(
  loader: UnitLoader, size: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]]:
  """Every unit once, in order, loaded ahead where records are read from files.

  Yields:
    The units int64[n], and what `UnitLoader.load` returns of them, padded to `size`.
  """
  everything = np.arange(loader.num_units)
  workers = default_workers(loader.source_info)
  if workers == 0:
    for part in cut(everything, size):
      yield part, *loader.load(part, size)
    return
  with Pipeline(
    loader, lambda step: everything, range(1), size, workers=workers, prefetch=workers + 2
  ) as ahead:
    for part in cut(everything, size):
      loaded = ahead.take(part)
      yield part, loaded.units, loaded.mask


class _Parts(Sequence[Any]):
  """The microbatches of all steps by number; None past the last.

  How many there are is not known before the last step is sampled, so the length is a pretence.
  Each can be had once, in an order close to theirs.
  """

  def __init__(
    self,
    indices: Callable[[int], np.ndarray],
    steps: range,
    size: int,
    load: Callable[[np.ndarray], Any],
  ):
    self._cuts: Iterator[np.ndarray] = (p for step in steps for p in cut(indices(step), size))
    self._load = load
    self._waiting: dict[int, np.ndarray | None] = {}
    self._known = 0
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, number: Any) -> Any:
    with self._lock:
      while self._known <= number:
        self._waiting[self._known] = next(self._cuts, None)
        self._known += 1
      part = self._waiting.pop(number)
    return None if part is None else self._load(part)
