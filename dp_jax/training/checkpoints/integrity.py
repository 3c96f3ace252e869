"""Whether what a checkpoint gives back is what was saved.

A disk that returns a changed bit of an array raises no error on the way: its checksums cover the
index of a checkpoint, not the arrays. One wrong bit in the state would go into every later step,
and one in the key would put other noise on the steps that are repeated.
"""

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def state_sums(state: Any) -> list[int]:
  """A 32-bit checksum of each leaf, computed where the leaves are; any one changed word shows."""
  return [int(x) for x in jax.device_get(_sums(state))]


@jax.jit
def _sums(state: Any) -> jax.Array:
  return jnp.stack([_sum(x) for x in jax.tree.leaves(state)])


def _sum(x: jax.Array) -> jax.Array:
  """The sum of the words, each times an odd number of its own, modulo 2^32."""
  words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
  # A position from each axis's own: a reshape would move shards between devices.
  position = jnp.zeros(words.shape, jnp.uint32)
  for axis in range(words.ndim):
    stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
    position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
  return jnp.sum(words * (2 * position + 1), dtype=jnp.uint32)


def seal(*parts: Any) -> str:
  """A digest of JSON values."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
