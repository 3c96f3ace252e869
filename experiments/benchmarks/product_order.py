"""In which order a float32 matrix product adds its terms, seen from outside.

    python -m experiments.benchmarks.product_order

All terms of an entry are 1, but for two that are 2^100 and -2^100: what is added to the first
before the second comes is lost. So what is missing from the sum says how many terms stand below the
two in the tree of additions (FPRev, Xie et al. 2024, arXiv:2411.00442). Printed is the length of
the chain that the first term begins: how many terms are added one after the other before a block
ends.
"""

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = ((512, 1280, 1000), (4096, 1280, 1000), (4096, 256, 64), (4096, 64, 16))
LARGE = 2.0**100


def below(
  product: jax.stages.Wrapped, shape: tuple[int, int, int], others: np.ndarray
) -> np.ndarray:
  """How many terms are below the common node of the first term and each of some others."""
  terms, inputs, outputs = shape
  found = []
  for start in range(0, len(others), inputs):
    some = others[start : start + inputs]
    left = np.ones((terms, inputs), np.float32)
    left[0, : len(some)] = LARGE
    left[some, np.arange(len(some))] = -LARGE
    sums = np.asarray(product(left, np.ones((terms, outputs), np.float32)))[: len(some)]
    found.append(terms - sums[:, 0])
  return np.concatenate(found).astype(int)


def main() -> None:
  """Prints a line for each shape."""

  @jax.jit
  def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("tk,to->ko", x, y, precision=jax.lax.Precision.HIGHEST)

  print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
  for shape in SHAPES:
    others = np.arange(1, shape[0])
    sizes = below(product, shape, others)
    # In one chain, the term i meets the first one after i additions.
    chain = int(np.argmax(sizes != others + 1)) if np.any(sizes != others + 1) else shape[0] - 1
    print(f"{shape[0]} terms, {shape[1]} x {shape[2]}: a chain of {chain + 1}, then blocks")


if __name__ == "__main__":
  main()
