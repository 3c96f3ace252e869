"""Sums of scaled rows over each class, on the host, at about the speed of reading the rows twice.

A piece of rows is multiplied from the left by a sparse matrix with one entry a row (scipy's loop
over columns: each row is read once, in order, and added to its sum; it holds no lock). In float32
at most `PLAIN` rows go into one such sum, and the sums are then added up in float64. Rows are
shared out by their places, in stretches just short enough, so that a row whose scale becomes zero
changes what is added to which for at most `PLAIN` others: a stretch that held one row too many.

  scaled rows of norm at most V: each sum rounds by PLAIN^2 2^-25 V, which is 2^-13 V.

A row that is taken out moves all later ones to other sums, which adds up over a million rows; for
that, the sums are float64 from the first addition, at about twice the time.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.sparse

Scaled = Callable[[np.ndarray, slice], tuple[np.ndarray, np.ndarray]]

# Rows that are added in plain float32.
PLAIN = 64
# Rows of one sparse product, and of its float64 copy where sums are exact.
_ROWS, _EXACT_ROWS = 16_384, 2048
_NORM_ROWS = 1024
# Entries of a row whose squares are added in plain float32.
_NORM_COLUMNS = 4096
# Squared norms in float32 are exact enough within these.
_SMALLEST_SQUARE, _LARGEST_SQUARE = 1e-30, 1e30


class ClassSums:
  """Adds up rows by class, shard by shard.

  Attributes:
    sums: float64[K, d].
  """

  def __init__(
    self, num_classes: int, num_features: int, *, exact: bool, threads: int | None = None
  ):
    """Starts at zero.

    Args:
      num_classes: K.
      num_features: d.
      exact: add in float64 from the first addition, for neighbours that lack a row.
      threads: None takes one a core. The result does not depend on it.
    """
    self.sums = np.zeros((num_classes, num_features))
    self._dtype = np.float64 if exact else np.float32
    self._piece = _EXACT_ROWS if exact else _ROWS
    self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1)
    self._turn = threading.Condition()

  def add(self, rows: np.ndarray, labels: np.ndarray, scaled: Scaled) -> None:
    """Adds rows.

    Args:
      rows: [B, d], of any real dtype; may be a memory map.
      labels: int[B], from 0 to K - 1 where the scale is not zero.
      scaled: (some rows, where they stand) -> (the same float32[n, d], their scales float64[n]),
        called for each piece on some thread. A row of scale zero may hold anything.
    """
    done = 0

    def one(index: int) -> None:
      nonlocal done
      piece = slice(index * self._piece, (index + 1) * self._piece)
      try:
        read, scales = scaled(rows[piece], piece)
        classes, sums = self._piece_sums(read, labels[piece], scales)
        with self._turn:
          self._turn.wait_for(lambda: done >= index)
          for label, part in zip(classes.tolist(), sums, strict=True):
            self.sums[label] += part
      finally:  # also after an error, or the others wait for ever
        with self._turn:
          done = max(done, index + 1)
          self._turn.notify_all()

    # What a thread allocates it frees itself, or memory is mapped anew for each piece.
    list(self._pool.map(one, range(-(-len(rows) // self._piece))))

  def _piece_sums(
    self, rows: np.ndarray, labels: np.ndarray, scales: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """(class int[n] of each sum, sums [n, d])."""
    kept = scales != 0
    sum_of, classes = assign(labels, kept, len(self.sums))
    ends = np.concatenate([[0], np.cumsum(kept)])
    entries = scales[kept].astype(self._dtype), sum_of, ends
    matrix = scipy.sparse.csc_array(entries, shape=(len(classes), len(rows)))
    return classes, matrix @ rows


def assign(labels: np.ndarray, kept: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
  """Which sum each kept row of a piece goes into: (int[kept.sum()], class int[n] of each sum).

  A sum is of the rows of one class in a stretch that holds at most `PLAIN` of them: the whole
  piece, or else each quarter on its own, and so on.
  """
  places = np.flatnonzero(kept)
  sum_of = np.empty(len(places), np.int64)
  group, class_of = labels[places].astype(np.int64), np.arange(num_classes)
  found: list[np.ndarray] = []
  rest, numbered, stretch = np.arange(len(places)), 0, _longest(len(labels))
  while len(rest):
    counts = np.bincount(group, minlength=len(class_of))
    few = (counts > 0) & (counts <= PLAIN)
    ready = few[group]
    sum_of[rest[ready]] = numbered - 1 + np.cumsum(few)[group[ready]]
    found.append(class_of[few])
    numbered += len(found[-1])
    rest, group = rest[~ready], group[~ready]
    many = counts > PLAIN
    stretch //= 4
    group = 4 * (np.cumsum(many) - 1)[group] + places[rest] // stretch % 4
    class_of = np.repeat(class_of[many], 4)
  return sum_of, np.concatenate([*found, class_of[:0]])


def _longest(count: int) -> int:
  """`PLAIN` times the power of 4 that covers so many rows."""
  stretch = PLAIN
  while stretch < count:
    stretch *= 4
  return stretch


def squared_norms(rows: np.ndarray) -> np.ndarray:
  """float32[B, d] -> float64[B]; infinite or NaN for a row that is not finite.

  Squares are summed in float32 (relative error below 2^-12), in float64 where that leaves its
  range.
  """
  total = np.zeros(len(rows))
  for start in range(0, len(rows), _NORM_ROWS):
    block, into = rows[start : start + _NORM_ROWS], total[start : start + _NORM_ROWS]
    for column in range(0, rows.shape[1], _NORM_COLUMNS):
      some = block[:, column : column + _NORM_COLUMNS]
      into += np.einsum("ij,ij->i", some, some)
  odd = np.flatnonzero(~((total > _SMALLEST_SQUARE) & (total < _LARGEST_SQUARE)))
  total[odd] = np.square(rows[odd].astype(np.float64)).sum(axis=1)
  return total
