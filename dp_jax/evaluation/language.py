"""Perplexity of a language model on a split, as an exact sum over its real tokens."""

import dataclasses

import numpy as np

from dp_jax.evaluation.class_metrics import GRID, in_units


@dataclasses.dataclass
class TokenSums:
  """Sums over the tokens seen so far, the same for any order and cut into batches.

  Attributes:
    loss_units: the summed cross-entropy, in nats, in multiples of 2^-32.
    tokens: how many there were.
  """

  loss_units: int = 0
  tokens: int = 0

  def add(self, losses: np.ndarray, mask: np.ndarray) -> None:
    """Adds tokens.

    Args:
      losses: float[...], the cross-entropy of each, in nats.
      mask: bool of that shape; False leaves a token out, whatever its loss.
    """
    # A loss that is not a number counts as that of a probability of 1e-38.
    worst = -np.log(np.finfo(np.float32).tiny)
    kept = np.asarray(losses, np.float64)[mask]
    kept = np.where(np.isfinite(kept), np.minimum(kept, worst), worst)
    self.loss_units += int(in_units(kept).sum())
    self.tokens += int(kept.size)

  def scalars(self) -> dict[str, float | None]:
    """`loss` (mean, nats a token) and `perplexity` (its exponential); None without a token."""
    if not self.tokens:
      return {"loss": None, "perplexity": None}
    loss = GRID * self.loss_units / self.tokens
    return {"loss": loss, "perplexity": float(np.exp(loss))}
