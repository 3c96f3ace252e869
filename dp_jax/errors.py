"""Errors that a user can mend."""


class UserError(ValueError):
  """An input that cannot be used; the message names the value and the fix.

  The command line shows the message as one line and exits with 2. Every other exception is a fault
  of dp_jax, or of a library that it calls, and keeps its traceback.
  """
