"""The master key: derivation, files, and that the secret stays out of sight."""

import hashlib

import pytest

from dp_jax.privacy import MasterKey

KEY = MasterKey(bytes(range(32)))


def test_from_os_is_fresh():
  first, second = MasterKey.from_os(), MasterKey.from_os()
  assert first.secret != second.secret and len(first.secret) == 32
  assert not first.is_test


def test_derivation_is_blake2b_keyed_by_the_secret():
  message = (8).to_bytes(8, "big") + b"sampling" + (3).to_bytes(8, "big")
  expected = hashlib.blake2b(message, digest_size=16, key=KEY.secret, person=b"dp_jax derive")
  assert KEY.derive("sampling", 3, 16) == expected.digest()


def test_derived_keys_differ_by_purpose_step_length_and_secret():
  other = MasterKey(bytes(32))
  keys = {
    KEY.derive("a", 0),
    KEY.derive("a", 1),
    KEY.derive("b", 0),
    KEY.derive("a", 0, 9)[:8],
    other.derive("a", 0),
  }
  assert len(keys) == 5
  assert KEY.derive("a", 1) == KEY.derive("a", 1)


@pytest.mark.parametrize(("purpose", "step", "size"), [("", 0, 8), ("a", -1, 8), ("a", 0, 65)])
def test_bad_derivations(purpose, step, size):
  with pytest.raises(ValueError):
    KEY.derive(purpose, step, size)


def test_the_secret_is_not_shown():
  for text in (repr(KEY), str(KEY), f"{KEY}", KEY.digest()):
    assert KEY.secret.hex() not in text
    assert repr(KEY.secret) not in text


def test_digest_tells_keys_apart():
  assert KEY.digest() == MasterKey(KEY.secret).digest()
  assert KEY.digest() != MasterKey(bytes(32)).digest()


def write(path, text, mode=0o600):
  path.write_text(text)
  path.chmod(mode)
  return path


def test_from_file(tmp_path):
  key = MasterKey.from_file(write(tmp_path / "key", "0f" * 32 + "\n"))
  assert key.secret == b"\x0f" * 32
  assert key.is_test


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666, 0o700])
def test_a_file_open_to_others_is_refused(tmp_path, mode):
  with pytest.raises(ValueError, match="chmod 600"):
    MasterKey.from_file(write(tmp_path / "key", "0f" * 32, mode))


@pytest.mark.parametrize("text", ["", "0f" * 31, "0f" * 33, "0g" * 32, "0f" * 32 + " 00"])
def test_a_file_that_is_no_key_is_refused(tmp_path, text):
  with pytest.raises(ValueError, match="64 hexadecimal"):
    MasterKey.from_file(write(tmp_path / "key", text))


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(ValueError, match="does not exist"):
    MasterKey.from_file(tmp_path / "key")


@pytest.mark.parametrize("secret", [b"short", bytes(33), "0" * 32])
def test_secrets_of_another_size(secret):
  with pytest.raises(ValueError, match="32 bytes"):
    MasterKey(secret)
