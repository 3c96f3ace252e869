"""A causal language model in the style of GPT-2, by name of its sizes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dp_jax.errors import UserError
from dp_jax.models.layers.transformer import Block, BlockConfig, make_dropout, make_norm

# "124m" is the smallest published model; "10m" has its shape at a size that trains on a CPU.
SIZES: dict[str, dict[str, int]] = {
  "10m": {"vocab": 8192, "context": 256, "width": 320, "depth": 6, "heads": 5},
  "124m": {"vocab": 50257, "context": 1024, "width": 768, "depth": 12, "heads": 12},
}


def build(size: str, **arguments: Any) -> "GPT2":
  """A language model of a named size.

  Args:
    size: a key of SIZES.
    **arguments: the other arguments of `GPT2` (rngs at least); they may also replace a number of
      the size.

  Raises:
    ValueError: if the size is unknown or the numbers do not fit each other.
  """
  if size not in SIZES:
    raise UserError(f"size={size!r} is not one of {', '.join(SIZES)}.")
  return GPT2(**{**SIZES[size], **arguments})


class GPT2(nnx.Module):
  """Token and position embeddings, pre-norm causal blocks, and logits from the same embedding.

  Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3: norms in
  the branches, one more at the end, residual kernels scaled down by the square root of the number
  of residual layers. Tied embeddings: Press and Wolf 2017, arXiv:1608.05859.
  """

  def __init__(
    self,
    *,
    vocab: int,
    context: int,
    width: int,
    depth: int,
    heads: int,
    dropout: float = 0.0,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    """Builds the model with fresh parameters.

    Args:
      vocab: tokens are 0 .. vocab - 1.
      context: the longest sequence.
      width: features of a position; the hidden layers have four times as many.
      depth: blocks.
      heads: attention heads; must divide the width.
      dropout: rate in the embedding, attention weights and residual branches; `model.eval()`
        turns it off.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values, and dropout where its rate is not 0.
    """
    self.dtype = jnp.dtype(dtype)
    self.context = context
    init = nnx.initializers.normal(0.02)
    residual_init = nnx.initializers.normal(0.02 / (2 * depth) ** 0.5)
    config = BlockConfig(
      width, heads, 4 * width, 1e-5, True, init, residual_init, dropout, self.dtype
    )
    self.tokens = nnx.Embed(vocab, width, embedding_init=init, dtype=self.dtype, rngs=rngs)
    self.positions = nnx.Param(init(rngs.params(), (context, width), jnp.float32))
    self.dropout = make_dropout(dropout, rngs)
    self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(depth)])
    self.norm = make_norm(config, rngs)

  def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Logits of the next token at every position.

    Args:
      tokens: int[N, T], T at most the context; what stands at masked positions has no influence
        on the others.
      mask: bool[N, T], False marks padding, on either side; None means that there is none.
        Positions are counted from the first column, padding included.

    Returns:
      float32[N, T, vocab]; those at masked positions mean nothing.

    Raises:
      ValueError: if the sequences are longer than the context.
    """
    length = tokens.shape[1]
    if length > self.context:
      raise UserError(
        f"sequences of {length} tokens do not fit the context of {self.context}; cut them."
      )
    if mask is not None:
      # Padding may be any integer, and an embedding out of range is NaN.
      tokens = jnp.where(mask, tokens, 0)
    positions = jax.lax.slice_in_dim(self.positions[...], 0, length)
    x = self.dropout(self.tokens(tokens) + positions.astype(self.dtype))
    visible = _visible(length, mask)
    for block in self.blocks:
      x = block(x, visible)
    return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def _visible(length: int, mask: jax.Array | None) -> jax.Array:
  """bool[T, T], or [N, 1, T, T] with a mask: which key (last) each query may see."""
  causal = jnp.tril(jnp.ones((length, length), bool))
  if mask is None:
    return causal
  # Each position sees itself, so that none is left with nothing to see.
  return causal & (mask[:, None, None, :] | jnp.eye(length, dtype=bool))
