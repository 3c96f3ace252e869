"""The key that a run uses on the software and hardware where it runs."""

from dp_jax.privacy.keys import MasterKey


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
