"""The clipped gradient of a head of exactly zero: one pass over the features, no matrix product.

From a head of zero all logits are equal, whatever the record. The derivative of a record's loss by
the logit of class k is then `shared`, less `own` if k is its label: 1/K and 1 under softmax, 1/2
and 1 under sigmoid. So the gradient of a record x with label y is

  (column k)  shared x - own x [k = y],

its norm is ||x|| sqrt((K - 1) shared^2 + (own - shared)^2), and the sum over records, each scaled
by its own c_i, is `shared` sum_i c_i x_i, less `own` times the sum over each class alone. A bias is
one more feature that is always 1. The gradient of a unit is the mean over its records.

Sums are kept in float64: the features lie on the host, and it reads them as fast as it can add.
(In float32, even of short runs of a class, a unit that is blanked or removed moves later ones to
other places, which round differently.) A row's square is summed in float32 (relative error below
2^-12, inside the margin of the bound), in float64 where that leaves its range.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from threadpoolctl import threadpool_limits

from dp_jax.gradients.clipping import check_clip_norm, sensitivity
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines import ClipAux
from dp_jax.gradients.norms import CLIP_MARGIN, LARGEST_RATIO
from dp_jax.gradients.styles import GAMMA, StyleName
from dp_jax.models.functional import Arrays
from dp_jax.tasks.classification import Classification

# Rows that are gathered at a time: they stay in a core's cache in float64.
_ROWS = 64
_NORM_ROWS = 512
# Entries of a row whose squares are added in plain float32.
_NORM_COLUMNS = 4096
# Squared norms in float32 are exact enough within these.
_SMALLEST_SQUARE, _LARGEST_SQUARE = 1e-30, 1e30


@dataclass(frozen=True)
class ZeroHead:
  """A linear head of zeros, its loss, and how gradients are clipped.

  Attributes:
    num_features: d.
    num_classes: K, at least 2.
    bias: whether a bias is trained.
    shared, own: the derivative of the loss by the logits, see above.
    loss: of every record.
    clip_norm: the bound C.
    clipping: "flat" or "automatic", as in `clipped_grad`.
    value_range: (low, high) of the inputs, mapped to [-1, 1] before the head.
  """

  num_features: int
  num_classes: int
  bias: bool
  shared: float
  own: float
  loss: float
  clip_norm: float
  clipping: StyleName = "flat"
  value_range: tuple[float, float] = (-1.0, 1.0)

  def __post_init__(self) -> None:
    """Refuses what has no gradient, or a bound that float32 does not serve."""
    check_clip_norm(self.clip_norm)
    if self.num_classes < 2 or self.num_features < 1:
      raise ValueError(
        f"a head needs a feature and two classes, not {self.num_features} and {self.num_classes}."
      )

  def sensitivity(self, adjacency: str) -> float:
    """L2 sensitivity of the sum, as of `ClippedGrad`."""
    return sensitivity(self.clip_norm, adjacency)

  def scales(self, norms: np.ndarray) -> np.ndarray:
    """What each unit's gradient is multiplied with: float64[B], 0 for a norm out of range."""
    bound = self.clip_norm * (1 - CLIP_MARGIN)
    kept = norms <= bound * LARGEST_RATIO  # false for infinity and NaN
    norms = np.where(kept, norms, 1.0)
    if self.clipping == "flat":
      factors = np.minimum(1.0, bound / np.maximum(norms, np.finfo(np.float64).tiny))
    else:
      factors = bound / (norms + GAMMA)
    return np.where(kept, factors, 0.0)


def zero_head(
  task: Classification, params: Arrays, frozen: Arrays, clip_norm: float, clipping: StyleName
) -> ZeroHead | None:
  """The head, if the task is a linear model whose arrays are all zero; None otherwise."""
  arrays = {**params, **frozen}
  spec = task.spec
  if spec.name != "linear" or spec.multilabel or spec.num_classes < 2:
    return None
  if "head.kernel" not in params:
    return None
  if any(np.any(np.asarray(value)) for value in arrays.values()):
    return None
  classes, smoothing = spec.num_classes, task.label_smoothing
  # The target is own at the label and smoothing / K at every class.
  mean, loss = (1 / classes, np.log(classes)) if task.link == "softmax" else (
    0.5, classes * np.log(2)
  )  # fmt: skip
  return ZeroHead(
    arrays["head.kernel"].shape[0], classes, "head.bias" in params,
    mean - smoothing / classes, 1 - smoothing, float(loss), clip_norm, clipping, spec.value_range,
  )  # fmt: skip


class ClosedFormSum:
  """Adds up clipped gradients, shard by shard.

  Formal guarantee: as `ClippedGrad`'s. Setting the mask of one unit to False, or removing it, moves
  the total by at most `head.clip_norm` in L2, whatever the units hold and however they are cut into
  shards: over two million units float64 rounds by less than half of the margin of 2^-10 C, at the
  very worst.
  """

  def __init__(self, head: ZeroHead, threads: int | None = None):
    """Starts at zero.

    Args:
      head: what is differentiated.
      threads: how many to read with; None takes one a core. The result does not depend on it.
    """
    self.head = head
    self._threads = threads or os.cpu_count() or 1
    size = head.num_features + 1  # the last column is the bias
    self._by_class = np.zeros((head.num_classes, size))
    self._columns: np.ndarray | None = None  # of units with records of every class

  def add(
    self,
    inputs: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray | None = None,
    record_mask: np.ndarray | None = None,
  ) -> ClipAux:
    """Adds units.

    Args:
      inputs: [B, *input_shape], a record a unit, or [B, R, *input_shape], up to R records; of any
        real dtype. May be a memory map.
      labels: int[B] or int[B, R]; a record with a label outside 0..K-1 is blank.
      mask: bool[B], False marks padding, which adds exactly zero.
      record_mask: bool[B, R], False marks a blank record.

    Returns:
      Norms and losses of the units, on the host. Not private.
    """
    labels = labels.reshape(len(inputs), -1)
    rows = inputs.reshape(*labels.shape, self.head.num_features)
    real = (labels >= 0) & (labels < self.head.num_classes)
    if record_mask is not None:
      real &= record_mask.reshape(labels.shape)
    if mask is not None:
      real &= mask[:, None]
    with np.errstate(all="ignore"), threadpool_limits(1, "blas"):
      norms = np.zeros(len(rows))
      if labels.shape[1] == 1:
        norms[real[:, 0]] = self._add_rows(rows[:, 0], labels[:, 0], real[:, 0])
      else:
        for start in range(0, len(rows), _ROWS):
          part = slice(start, start + _ROWS)
          norms[part] = self._add_units(rows[part], labels[part], real[part])
      counted = real.any(axis=1)
      losses = np.where(counted, np.float32(self.head.loss), np.float32(0))
      return ClipAux(norms.astype(np.float32), losses)  # type: ignore[arg-type]

  def total(self) -> Compensated:
    """The sum so far as a pair: head.kernel float32[d, K] and, if trained, head.bias float32[K]."""
    head = self.head
    columns = head.shared * self._by_class.sum(axis=0) - head.own * self._by_class
    if self._columns is not None:
      columns = columns + self._columns
    grads = {"head.kernel": columns[:, :-1].T}
    if head.bias:
      grads["head.bias"] = columns[:, -1]
    sums = {name: value.astype(np.float32) for name, value in sorted(grads.items())}
    errors = {name: (grads[name] - value).astype(np.float32) for name, value in sums.items()}
    return jax.device_put(Compensated(sums, errors))

  def _read(self, rows: np.ndarray) -> np.ndarray:
    """Features as the head sees them, float32."""
    rows = rows.astype(np.float32, copy=False)
    low, high = self.head.value_range
    if (low, high) == (-1, 1):
      return rows
    scale = np.float32(2 / (high - low))
    return (rows - np.float32(low)) * scale - np.float32(1)

  def _add_rows(self, rows: np.ndarray, labels: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Units of one record each: their norms, float64[real.sum()]."""
    head = self.head
    factor = np.sqrt((head.num_classes - 1) * head.shared**2 + (head.own - head.shared) ** 2)
    norms = np.sqrt(self._squares(rows) + head.bias)[real] * factor
    scales = np.zeros(len(rows))
    scales[real] = head.scales(norms)
    self._add_to_classes(rows, labels, scales)
    return norms

  def _squares(self, rows: np.ndarray) -> np.ndarray:
    """Squared norms, float64[B]."""
    squares = np.empty(len(rows))

    def one(start: int) -> None:
      part = slice(start, start + _NORM_ROWS)
      block = self._read(rows[part])
      total = np.zeros(len(block))
      for column in range(0, block.shape[1], _NORM_COLUMNS):
        some = block[:, column : column + _NORM_COLUMNS]
        total += np.einsum("ij,ij->i", some, some)
      odd = np.flatnonzero(~((total > _SMALLEST_SQUARE) & (total < _LARGEST_SQUARE)))
      total[odd] = np.square(block[odd].astype(np.float64)).sum(axis=1)
      squares[part] = total

    self._each(one, range(0, len(rows), _NORM_ROWS))
    return squares

  def _add_to_classes(self, rows: np.ndarray, labels: np.ndarray, scales: np.ndarray) -> None:
    """Adds scaled rows to the sums of their classes. No two threads share a class."""
    kept = np.flatnonzero(scales)  # the others may hold NaN
    order = kept[np.argsort(labels[kept], kind="stable")]
    ends = np.flatnonzero(np.diff(labels[order], append=-1)) + 1
    runs = list(zip([0, *ends[:-1]], ends, strict=True))
    self._by_class[:, -1] += np.bincount(
      labels[order], weights=scales[order], minlength=self.head.num_classes
    )

    def one(some: Sequence[tuple[int, int]]) -> None:
      buffer = np.empty((_ROWS, self.head.num_features))
      for first, end in some:
        into = self._by_class[labels[order[first]], :-1]
        for start in range(first, end, _ROWS):
          part = order[start : min(start + _ROWS, end)]
          first_row, after = part[0], part[-1] + 1
          # In order of class, as folders of images are, rows need not be gathered.
          together = after - first_row == len(part)
          taken = self._read(rows[first_row:after] if together else rows[part])
          buffer[: len(part)] = taken
          into += scales[part] @ buffer[: len(part)]

    # Of about equal numbers of rows.
    cuts = np.searchsorted(ends, np.linspace(0, len(order), self._threads + 1)[1:-1])
    self._each(one, [runs[a:b] for a, b in zip([0, *cuts], [*cuts, len(runs)], strict=True)])

  def _add_units(self, rows: np.ndarray, labels: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Units of several records, a few at a time: their norms, float64[B].

    A unit's sums over its records come first, unscaled, so that records that cancel are small
    before they are scaled, and what is added is what the norm was taken of.
    """
    head = self.head
    size = np.maximum(real.sum(axis=1), 1)
    unit, slot = np.nonzero(real)
    weighted = np.ones((len(unit), head.num_features + 1))
    weighted[:, :-1] = self._read(rows[unit, slot])
    weighted[:, -1] = head.bias
    weighted /= size[unit, None]
    # One row a unit and class that occurs in it.
    pairs, which = np.unique(unit * head.num_classes + labels[unit, slot], return_inverse=True)
    owner, label = np.divmod(pairs, head.num_classes)
    parts = np.zeros((len(pairs), head.num_features + 1))
    np.add.at(parts, which, weighted)
    whole = np.zeros((len(rows), head.num_features + 1))
    np.add.at(whole, owner, parts)
    present = head.shared * whole[owner] - head.own * parts
    squares = np.zeros(len(rows))
    np.add.at(squares, owner, np.square(present).sum(axis=1))
    absent = head.num_classes - np.bincount(owner, minlength=len(rows))
    squares += absent * head.shared**2 * np.square(whole).sum(axis=1)
    norms = np.sqrt(squares)
    scales = head.scales(norms)[owner]
    used = scales != 0
    full = self._added_by_columns(absent)[owner]
    normal = used & ~full
    np.add.at(self._by_class, label[normal], scales[normal, None] * parts[normal])
    if np.any(used & full):
      if self._columns is None:
        self._columns = np.zeros_like(self._by_class)
      rest = used & full
      np.add.at(self._columns, label[rest], scales[rest, None] * present[rest])
    return norms

  def _added_by_columns(self, absent: np.ndarray) -> np.ndarray:
    """Which units are not added to the sums of classes: bool, from how many classes each lacks.

    With a class absent, `shared` times the sum of the records is a column of the gradient itself,
    and so bounded by its norm. Without one it may be huge where the gradient is small.
    """
    return absent == 0

  def _each(self, function, items) -> None:  # type: ignore[no-untyped-def]
    """Calls a function on each item, on all threads."""
    items = list(items)
    if self._threads == 1 or len(items) < 2:
      for item in items:
        function(item)
      return
    with ThreadPoolExecutor(self._threads) as pool:
      list(pool.map(function, items))
