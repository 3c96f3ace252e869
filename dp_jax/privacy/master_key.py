"""The secret that all of a run's sampling and noise derive from."""

import dataclasses
import hashlib
import os
import pathlib
import re
import secrets
import stat

from dp_jax.errors import UserError
from dp_jax.files import checks

SECRET_BYTES = 32
# The generator of units' own randomness and of the noise, and the width of its keys, as jax has it:
# both stand in the statement, which is verified without jax.
GENERATOR = "threefry2x32"
GENERATOR_KEY_BITS = 64
_MAX_DERIVED_BYTES = 64
# Domain separation: the digest must not be a key that some purpose could ask for.
_DERIVE = b"dp_jax derive"
_DIGEST = b"dp_jax digest"


@dataclasses.dataclass(frozen=True, repr=False)
class MasterKey:
  """256 secret bits; every key of a run is a keyed hash of them.

  Whoever knows the secret can subtract the noise, so it never appears in a repr,
  a log, a config or a release.

  Attributes:
    secret: bytes[32].
    is_test: True if it came from a file, which makes the run not private.
  """

  secret: bytes
  is_test: bool = False

  def __post_init__(self) -> None:
    if not isinstance(self.secret, bytes) or len(self.secret) != SECRET_BYTES:
      raise UserError(f"a master key is {SECRET_BYTES} bytes; use MasterKey.from_os()")

  def __repr__(self) -> str:
    return f"MasterKey(secret=<hidden>, is_test={self.is_test})"

  @classmethod
  def from_os(cls) -> "MasterKey":
    """Draws a fresh key from the operating system's generator."""
    return cls(secrets.token_bytes(SECRET_BYTES))

  @classmethod
  def from_file(cls, path: str | os.PathLike[str]) -> "MasterKey":
    """Reads a fixed key, for tests alone.

    Args:
      path: a file of mode 0600 that holds 64 hexadecimal digits.

    Raises:
      ValueError: if the file is missing, open to others, or holds anything else.
    """
    file = pathlib.Path(path)
    if not file.is_file():
      raise UserError(f"key file {file} does not exist; write 64 hexadecimal digits to it")
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode != 0o600:
      raise UserError(f"key file {file} has mode {mode:04o}; run chmod 600 on it")
    text = file.read_bytes().strip()
    if not re.fullmatch(rb"[0-9a-fA-F]{64}", text):
      raise UserError(f"key file {file} does not hold 64 hexadecimal digits; write those")
    return cls(bytes.fromhex(text.decode("ascii")), is_test=True)

  def derive(self, purpose: str, step: int = 0, num_bytes: int = 8) -> bytes:
    """Returns the key of one (purpose, step): BLAKE2b of them, keyed by the secret.

    Args:
      purpose: what the key is for, such as "sampling" or "noise".
      step: the step, from 0.
      num_bytes: its length, 1 to 64. Keys of different lengths are independent.

    Returns:
      bytes[num_bytes].

    Raises:
      ValueError: if the step is negative, the purpose empty, or the length out of range.

    RFC 7693, section 2.9 (keyed hashing).
    """
    if not isinstance(purpose, str) or not purpose:
      raise UserError(f"purpose is {purpose!r}; name what the key is for")
    step = checks.integer("step", step, minimum=0)
    if not 1 <= checks.integer("num_bytes", num_bytes) <= _MAX_DERIVED_BYTES:
      raise UserError(f"num_bytes is {num_bytes}; give at most {_MAX_DERIVED_BYTES}")
    return self._hash(_DERIVE, purpose, step, num_bytes)

  def digest(self) -> str:
    """Returns 32 hexadecimal digits that tell keys apart and reveal nothing of them."""
    return self._hash(_DIGEST, "", 0, 16).hex()

  def _hash(self, domain: bytes, purpose: str, step: int, num_bytes: int) -> bytes:
    name = purpose.encode("utf-8")
    message = b"".join([len(name).to_bytes(8, "big"), name, step.to_bytes(8, "big")])
    # `person` holds at most 16 bytes.
    return hashlib.blake2b(message, digest_size=num_bytes, key=self.secret, person=domain).digest()
