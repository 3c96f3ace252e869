"""The clipped gradient of a head of exactly zero: one pass over the features, no matrix product.

From a head of zero all logits are equal, whatever the record. The derivative of a record's loss by
the logit of class k is then `shared`, less `own` if k is its label: 1/K and 1 under softmax, 1/2
and 1 under sigmoid. So the gradient of a record x with label y is

  (column k)  shared x - own x [k = y],

its norm is ||x|| sqrt((K - 1) shared^2 + (own - shared)^2), and the sum over records, each scaled
by its own c_i, is `shared` sum_i c_i x_i, less `own` times the sum over each class alone. A bias is
one more feature that is always 1. The gradient of a unit is the mean over its records.

Sums over classes are kept in float64 (`class_sums.py`), on the host: the features lie there, and it
reads them as fast as it can add.
"""

from dataclasses import dataclass

import jax
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients.clipping import check_clip_norm, sensitivity
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.engines.dispatch import ClipAux
from dp_jax.gradients.engines.norms import CLIP_MARGIN, LARGEST_RATIO
from dp_jax.gradients.engines.styles import GAMMA, StyleName
from dp_jax.models.functional import Arrays
from dp_jax.solvers.class_sums import ClassSums, squared_norms
from dp_jax.tasks.bound import BoundTask
from dp_jax.tasks.classification import Classification

# Units of several records that are added at a time.
_UNITS = 64


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
      raise UserError(
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
  task: BoundTask, params: Arrays, frozen: Arrays, clip_norm: float, clipping: StyleName
) -> ZeroHead | None:
  """The head, if the task is a linear model whose arrays are all zero; None otherwise."""
  arrays, head = {**params, **frozen}, task.task
  if task.spec.name != "linear" or type(head) is not Classification or head.num_classes < 2:
    return None
  if "head.kernel" not in params:
    return None
  if any(np.any(np.asarray(value)) for value in arrays.values()):
    return None
  classes, smoothing = head.num_classes, head.label_smoothing
  # The target is own at the label and smoothing / K at every class.
  mean, loss = (1 / classes, np.log(classes)) if head.link == "softmax" else (
    0.5, classes * np.log(2)
  )  # fmt: skip
  return ZeroHead(
    arrays["head.kernel"].shape[0], classes, "head.bias" in params,
    mean - smoothing / classes, 1 - smoothing, float(loss), clip_norm, clipping, head.value_range,
  )  # fmt: skip


class ClosedFormSum:
  """Adds up clipped gradients, shard by shard.

  Formal guarantee: as `ClippedGrad`'s. Setting the mask of one unit to False, blanking it, or,
  under add_or_remove_one, taking it out moves the total by at most `head.clip_norm` in L2, whatever
  the units hold: what `ClassSums` rounds, and over two million units float64, is less than half of
  the margin of 2^-10 C, at the very worst.
  """

  def __init__(self, head: ZeroHead, adjacency: str, threads: int | None = None):
    """Starts at zero.

    Args:
      head: what is differentiated.
      adjacency: of the mechanism.
      threads: how many to read with; None takes one a core. The result does not depend on it.
    """
    self.head = head
    exact = adjacency == "add_or_remove_one"  # then later units move to other places
    self._rows = ClassSums(head.num_classes, head.num_features, exact=exact, threads=threads)
    # The last column is the bias.
    self._units = np.zeros((head.num_classes, head.num_features + 1))
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
    if labels.shape[1] == 1:
      norms = self._add_rows(rows[:, 0], labels[:, 0], real[:, 0])
    else:
      norms = np.zeros(len(rows))
      for start in range(0, len(rows), _UNITS):
        part = slice(start, start + _UNITS)
        with np.errstate(all="ignore"):
          norms[part] = self._add_units(rows[part], labels[part], real[part])
    losses = np.where(real.any(axis=1), np.float32(self.head.loss), np.float32(0))
    with np.errstate(over="ignore"):
      return ClipAux(norms.astype(np.float32), losses)  # type: ignore[arg-type]

  def total(self) -> Compensated:
    """The sum so far as a pair: head.kernel float32[d, K] and, if trained, head.bias float32[K]."""
    head = self.head
    by_class = self._units.copy()
    by_class[:, :-1] += self._rows.sums
    columns = head.shared * by_class.sum(axis=0) - head.own * by_class
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
    """Units of one record each: their norms, float64[B]."""
    head = self.head
    factor = np.sqrt((head.num_classes - 1) * head.shared**2 + (head.own - head.shared) ** 2)
    norms, scales = np.zeros((2, len(rows)))

    def scaled(some: np.ndarray, piece: slice) -> tuple[np.ndarray, np.ndarray]:
      with np.errstate(all="ignore"):  # which each thread has of its own
        some = self._read(some)
        norms[piece] = np.where(real[piece], self._row_norms(some) * factor, 0.0)
        scales[piece] = np.where(real[piece], head.scales(norms[piece]), 0.0)
      return some, scales[piece]

    self._rows.add(rows, labels, scaled)
    if head.bias:
      kept = scales != 0
      self._units[:, -1] += np.bincount(
        labels[kept], weights=scales[kept], minlength=head.num_classes
      )
    return norms

  def _row_norms(self, rows: np.ndarray) -> np.ndarray:
    """Of rows with the bias's 1, float64[B]."""
    return np.sqrt(squared_norms(rows) + self.head.bias)

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
    np.add.at(self._units, label[normal], scales[normal, None] * parts[normal])
    if np.any(used & full):
      if self._columns is None:
        self._columns = np.zeros_like(self._units)
      rest = used & full
      np.add.at(self._columns, label[rest], scales[rest, None] * present[rest])
    return norms

  def _added_by_columns(self, absent: np.ndarray) -> np.ndarray:
    """Which units are not added to the sums of classes: bool, from how many classes each lacks.

    With a class absent, `shared` times the sum of the records is a column of the gradient itself,
    and so bounded by its norm. Without one it may be huge where the gradient is small.
    """
    return absent == 0
