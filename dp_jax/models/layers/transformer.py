"""Pre-norm transformer blocks, shared by the vision transformer and the language model.

The projections are plain `nnx.Linear` layers and attention is written out in `jax.numpy`, so that
every parameter enters through one ordinary contraction.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from dp_jax.errors import UserError

# Far below any score, and finite: a difference of two of them is not NaN.
MASKED_SCORE = -1e30


@dataclasses.dataclass(frozen=True)
class BlockConfig:
  """What all blocks of one transformer share.

  Attributes:
    width: features of the residual stream.
    heads: attention heads; must divide the width.
    mlp_width: features of the hidden layer.
    norm_epsilon: added to the variance in LayerNorm.
    approximate_gelu: the tanh approximation in place of the error function.
    kernel_init: initial kernels.
    residual_init: initial kernels of the two layers that write into the residual stream.
    dropout: rate on attention weights and on what is added to the residual stream.
    dtype: of the computation; parameters are float32.
  """

  width: int
  heads: int
  mlp_width: int
  norm_epsilon: float
  approximate_gelu: bool
  kernel_init: Initializer
  residual_init: Initializer
  dropout: float
  dtype: DTypeLike

  def __post_init__(self) -> None:
    if self.width % self.heads:
      raise UserError(f"width={self.width} must be divisible by heads={self.heads}.")
    if not 0 <= self.dropout < 1:
      raise UserError(f"dropout={self.dropout} must be at least 0 and below 1.")


def make_dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
  """Dropout; without random-number state where the rate is 0, so that no key is needed."""
  return nnx.Dropout(rate, rngs=rngs if rate > 0 else None)


class Attention(nnx.Module):
  """Multi-head self-attention with one projection for queries, keys and values, in this order.

  Scores and softmax are float32. Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
  """

  def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
    width, dtype = config.width, config.dtype
    self.heads = config.heads
    self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, kernel_init=config.kernel_init, rngs=rngs)
    self.out = nnx.Linear(width, width, dtype=dtype, kernel_init=config.residual_init, rngs=rngs)
    self.dropout = make_dropout(config.dropout, rngs)

  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """float[N, T, width] -> the same shape; mask bool[..., T, T] is True where query sees key."""
    num, length, width = x.shape
    qkv = self.qkv(x).reshape(num, length, 3, self.heads, width // self.heads)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    query = query * (width // self.heads) ** -0.5
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key, preferred_element_type=jnp.float32)
    if mask is not None:
      scores = jnp.where(mask, scores, MASKED_SCORE)
    weights = self.dropout(jax.nn.softmax(scores).astype(value.dtype))
    mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, value)
    return self.out(mixed.reshape(num, length, width))


class Mlp(nnx.Module):
  """Two linear layers with GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) between them."""

  def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
    width, hidden, dtype = config.width, config.mlp_width, config.dtype
    self.approximate = config.approximate_gelu
    self.up = nnx.Linear(width, hidden, dtype=dtype, kernel_init=config.kernel_init, rngs=rngs)
    self.down = nnx.Linear(hidden, width, dtype=dtype, kernel_init=config.residual_init, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """float[..., width] -> the same shape."""
    return self.down(jax.nn.gelu(self.up(x), approximate=self.approximate))


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)).

  Normalisation inside the branch: Radford et al. 2019 (GPT-2), section 2.3; Dosovitskiy et al.
  2021, arXiv:2010.11929, equations 2 and 3.
  """

  def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
    self.attention_norm = make_norm(config, rngs)
    self.attention = Attention(config, rngs=rngs)
    self.mlp_norm = make_norm(config, rngs)
    self.mlp = Mlp(config, rngs=rngs)
    self.dropout = make_dropout(config.dropout, rngs)

  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """float[N, T, width] -> the same shape; mask bool[..., T, T] is True where query sees key."""
    x = x + self.dropout(self.attention(self.attention_norm(x), mask))
    return x + self.dropout(self.mlp(self.mlp_norm(x)))


def make_norm(config: BlockConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
  """LayerNorm over the features of one position (Ba et al. 2016, arXiv:1607.06450)."""
  return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=config.dtype, rngs=rngs)
