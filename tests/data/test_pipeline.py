"""Loading ahead: the same microbatches in the same order, bounded, and errors where they belong."""

import threading
import time

import numpy as np
import pytest
from support import one_label

from dp_jax.data import ArraySource, SourceInfo, UnitLoader
from dp_jax.data.pipeline import (
  Microbatch,
  Pipeline,
  cut,
  default_workers,
  in_order,
  load_microbatch,
)

SIZE = 4
STEPS = range(3, 20)


def _indices(step: int) -> np.ndarray:
  """Steps of 0 to 11 units; every fourth is empty."""
  return np.arange(step, step + 5 * (step % 4) - step % 4, dtype=np.int64)


def _loader(num_records: int = 64) -> UnitLoader:
  info = SourceInfo("x", num_records, (3,), 5, (0.0, 1.0), input_dtype="float32")
  inputs = np.random.default_rng(0).random((num_records, 3), np.float32)
  return UnitLoader(
    ArraySource(info, inputs, np.arange(num_records) % 5), one_label((3,), 5, (0.0, 1.0))
  )


class SlowLoader:
  """Counts what is being loaded; takes longer for some, so that threads overtake each other."""

  def __init__(self, fails_at: int | None = None):
    self.started: list[int] = []
    self.fails_at = fails_at

  def load(self, indices, size):
    first = int(indices[0])
    self.started.append(first)
    if self.fails_at in indices:
      raise ValueError(f"record {self.fails_at} is malformed")
    time.sleep(0.002 * (first % 3))
    return {"inputs": np.full(size, first)}, np.arange(size) < len(indices)


def _ahead(loader, **changes) -> Pipeline:
  return Pipeline(loader, _indices, STEPS, SIZE, **{"workers": 3, "prefetch": 5, **changes})


def test_the_same_microbatches_in_the_same_order():
  loader, count = _loader(), 0
  with _ahead(loader) as ahead:
    for step in STEPS:
      for part in cut(_indices(step), SIZE):
        loaded, expected = ahead.take(part), load_microbatch(loader, part, SIZE)
        for name in expected.units:
          np.testing.assert_array_equal(loaded.units[name], expected.units[name])
        np.testing.assert_array_equal(loaded.mask, expected.mask)
        np.testing.assert_array_equal(loaded.unit_ids, expected.unit_ids)
        assert loaded.mask.shape == (SIZE,) and loaded.unit_ids.dtype == np.uint32
        count += 1
  assert count == sum(-(-len(_indices(step)) // SIZE) for step in STEPS) > len(STEPS)


def test_no_more_than_prefetch_are_under_way():
  loader = SlowLoader()
  taken = 0
  with _ahead(loader, workers=8, prefetch=3) as ahead:
    for step in STEPS:
      for part in cut(_indices(step), SIZE):
        ahead.take(part)
        taken += 1
        time.sleep(0.003)
        assert taken <= len(loader.started) <= taken + 3
  # It goes past the border of a step: an empty one lies between.
  assert taken == len(loader.started)


def test_an_error_comes_where_its_microbatch_is_taken():
  broken = next(step for step in STEPS if len(_indices(step)) > SIZE)
  second = cut(_indices(broken), SIZE)[1]
  ahead = _ahead(SlowLoader(fails_at=int(second[-1])))
  with pytest.raises(ValueError, match=f"record {second[-1]} is malformed"), ahead:
    for step in STEPS:
      for part in cut(_indices(step), SIZE):
        ahead.take(part)
        assert step <= broken

  # An error of the one who samples, too.
  def refuses(step):
    raise ValueError("no step")

  with (
    Pipeline(SlowLoader(), refuses, STEPS, SIZE, workers=2, prefetch=2) as ahead,
    pytest.raises(ValueError, match="no step"),
  ):
    ahead.take(np.arange(2))


def test_threads_end_with_the_context_whatever_ends_it():
  before = {*threading.enumerate()}
  with pytest.raises(KeyboardInterrupt), _ahead(SlowLoader()) as ahead:
    ahead.take(cut(_indices(STEPS[0]), SIZE)[0])
    started = {*threading.enumerate()} - before
    assert started
    raise KeyboardInterrupt
  for thread in started:
    thread.join(timeout=30)
    assert not thread.is_alive()
  with _ahead(SlowLoader()):  # never used
    pass


def test_another_order_of_steps_is_refused():
  with _ahead(_loader()) as ahead, pytest.raises(RuntimeError, match="is not that of this step"):
    ahead.take(np.array([1, 2]))
  last = Pipeline(_loader(), _indices, range(3, 4), SIZE, workers=1, prefetch=1)
  with last as ahead:
    for part in cut(_indices(3), SIZE):
      ahead.take(part)
    with pytest.raises(RuntimeError, match="is not that of this step"):
      ahead.take(np.array([1]))
  with pytest.raises(ValueError, match="workers=0 and prefetch=1 must be at least 1"):
    _ahead(_loader(), workers=0, prefetch=1)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_rows_of_processes_together_make_the_microbatch(count):
  """Each process loads its rows only; what it reads stays with the units of the others out."""
  loader, part = _loader(), np.arange(10, 10 + count)
  whole = load_microbatch(loader, part, SIZE)
  for owners in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
    shards = [load_microbatch(loader, part, SIZE, np.array(rows)) for rows in owners]
    order = np.argsort(np.concatenate(owners))

    def joined(pick, shards=shards, order=order):
      return np.concatenate([pick(shard) for shard in shards])[order]

    np.testing.assert_array_equal(joined(lambda m: m.mask), whole.mask)
    np.testing.assert_array_equal(joined(lambda m: m.unit_ids), whole.unit_ids)
    for name in whole.units:
      np.testing.assert_array_equal(joined(lambda m, name=name: m.units[name]), whole.units[name])


def test_put_is_called_by_the_threads_and_what_it_gives_is_taken():
  names = set()

  def put(microbatch: Microbatch) -> Microbatch:
    names.add(threading.current_thread())
    return microbatch._replace(units="placed")

  with _ahead(_loader(), put=put, rows=np.array([1, 2])) as ahead:
    for step in STEPS:
      for part in cut(_indices(step), SIZE):
        taken = ahead.take(part)
        assert taken.units == "placed" and taken.mask.shape == (2,)
  assert names and threading.main_thread() not in names


def test_data_in_memory_needs_no_threads():
  info = _loader().source_info
  assert default_workers(info) == 0
  on_demand = SourceInfo("x", 1, None, None, (0.0, 1.0), read_on_demand=True)
  assert default_workers(on_demand) >= 1


@pytest.mark.parametrize("read_on_demand", [False, True])
def test_every_unit_once_in_order(read_on_demand):
  loader = _loader(10)
  object.__setattr__(loader.source_info, "read_on_demand", read_on_demand)
  pieces = [*in_order(loader, SIZE)]
  np.testing.assert_array_equal(np.concatenate([part for part, _, _ in pieces]), np.arange(10))
  for part, units, mask in pieces:
    expected, expected_mask = loader.load(part, SIZE)
    np.testing.assert_array_equal(mask, expected_mask)
    np.testing.assert_array_equal(units["inputs"], expected["inputs"])
