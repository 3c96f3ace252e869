"""JAX keys from the secret master key."""

import jax
import numpy as np

from dp_jax.privacy.keys import MasterKey

# The generator of units' own randomness and of the noise; its width stands in the statement.
GENERATOR = "threefry2x32"
GENERATOR_KEY_BITS = 64


def step_key(master: MasterKey, purpose: str, step: int) -> jax.Array:
  """The JAX key of one purpose and step: a keyed hash of the master key, never a counter seed.

  Returns:
    One typed key, a concrete array. Pass it to compiled functions as an argument.
  """
  data = np.frombuffer(master.derive(purpose, step, GENERATOR_KEY_BITS // 8), np.uint32)
  # By name: a guard refuses other transfers within a step.
  return jax.random.wrap_key_data(jax.device_put(data), impl=GENERATOR)


def for_environment(master: MasterKey, environment: str) -> MasterKey:
  """The key that a run uses on this software and hardware.

  The same step computed by other software rounds differently; with the same noise, the difference
  of the two would be free of it. So each environment has keys of its own, and a run that goes on
  elsewhere repeats its last steps with fresh noise. Test keys stay as they are, so that tests can
  compare environments; their runs are not private anyway.
  """
  if master.is_test:
    return master
  return MasterKey(master.derive(f"environment {environment}", 0, 32))
