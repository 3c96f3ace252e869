"""Low-rank adaptation: frozen linear layers, each with a small trained product beside it."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from dp_jax.errors import UserError

# Matches the names of the low-rank factors, and of nothing else.
LORA_PARAMETERS = r"(^|\.)lora_[ab]$"


class LoRALinear(nnx.Linear):
  """A linear layer plus (alpha / rank) * x A B; B starts at zero, so the layer starts unchanged.

  The kernel and bias are those of the layer that it replaces, under the same names, so that
  weights of the model without LoRA still fit. What is trained is decided by name, as everywhere:
  LORA_PARAMETERS leaves the kernel and bias frozen.

  Hu et al. 2021, arXiv:2106.09685, section 4.1.
  """

  def __init__(self, base: nnx.Linear, *, rank: int, alpha: float, rngs: nnx.Rngs):
    """Takes the place of a layer.

    Args:
      base: the layer; its variables are shared, not copied.
      rank: columns of A float32[in, rank] and rows of B float32[rank, out].
      alpha: the product is scaled by alpha / rank.
      rngs: for the initial A, Gaussian of variance 1 / in.

    Raises:
      ValueError: if the rank is not positive.
    """
    if rank < 1:
      raise UserError(f"rank={rank} must be at least 1.")
    super().__init__(
      base.in_features, base.out_features, use_bias=base.use_bias, dtype=base.dtype,
      param_dtype=base.param_dtype, precision=base.precision, dot_general=base.dot_general,
      promote_dtype=base.promote_dtype, preferred_element_type=base.preferred_element_type,
      # A kernel of its own would be thrown away at once.
      kernel_init=lambda *_: base.kernel[...], rngs=rngs,
    )  # fmt: skip
    self.kernel, self.bias = base.kernel, base.bias
    self.scale = alpha / rank
    normal = nnx.initializers.normal(base.in_features**-0.5)
    zeros = nnx.initializers.zeros
    key = rngs.params()
    self.lora_a = nnx.Param(normal(key, (base.in_features, rank), base.param_dtype))
    self.lora_b = nnx.Param(zeros(key, (rank, base.out_features), base.param_dtype))

  def __call__(
    self, inputs: jax.Array, out_sharding: jax.sharding.Sharding | None = None
  ) -> jax.Array:
    """float[..., in] -> float[..., out]."""
    base = super().__call__(inputs, out_sharding)
    x, a, b = self.promote_dtype((inputs, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
    return base + (self.scale * ((x @ a) @ b)).astype(base.dtype)


def add_lora(
  model: nnx.Module,
  chosen: Callable[[str], object],
  *,
  rank: int,
  alpha: float,
  rngs: nnx.Rngs,
) -> str:
  r"""Puts a LoRALinear in the place of chosen `nnx.Linear` layers of a model, in place.

  Args:
    model: any module; a layer that it reaches by two paths is replaced at one of them.
    chosen: whether a layer of this dotted name ("blocks.0.attention.qkv") is adapted; for example
      `re.compile(r"attention\.(qkv|out)$").search`.
    rank: of each product.
    alpha: each product is scaled by alpha / rank.
    rngs: for the initial factors.

  Returns:
    The regular expression on parameter names that trains the factors alone; join others to it with
    "|", such as "|^head".

  Raises:
    ValueError: if no layer is chosen, naming those there are, or the rank is not positive.
  """
  layers = {
    ".".join(map(str, path)): (path, module)
    for path, module in nnx.iter_modules(model)
    if path and isinstance(module, nnx.Linear) and not isinstance(module, LoRALinear)
  }
  names = [name for name in layers if chosen(name)]
  if not names:
    raise UserError(f"no linear layer was chosen for LoRA from {', '.join(layers) or 'none'}.")
  for name in names:
    path, layer = layers[name]
    parent: Any = model
    for part in path[:-1]:
      parent = parent[part] if isinstance(part, int) else getattr(parent, str(part))
    adapted = LoRALinear(layer, rank=rank, alpha=alpha, rngs=rngs)
    if isinstance(path[-1], int):
      parent[path[-1]] = adapted
    else:
      setattr(parent, str(path[-1]), adapted)
  return LORA_PARAMETERS
