"""JAX keys from the secret master key."""

import jax
import numpy as np

from dp_jax.privacy.master_key import GENERATOR, GENERATOR_KEY_BITS, MasterKey

__all__ = ["GENERATOR", "GENERATOR_KEY_BITS", "step_key"]


def step_key(master: MasterKey, purpose: str, step: int) -> jax.Array:
  """The JAX key of one purpose and step: a keyed hash of the master key, never a counter seed.

  Returns:
    One typed key, a concrete array. Pass it to compiled functions as an argument.
  """
  data = np.frombuffer(master.derive(purpose, step, GENERATOR_KEY_BITS // 8), np.uint32)
  # By name: a guard refuses other transfers within a step.
  return jax.random.wrap_key_data(jax.device_put(data), impl=GENERATOR)
