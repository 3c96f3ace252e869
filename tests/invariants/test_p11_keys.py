"""P11: keys are 256 secret bits, passed as arguments, and never compiled in, logged or printed."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training.checkpoints.run_key import for_environment


def test_the_master_key_is_256_bits_from_the_operating_system(monkeypatch):
  asked = []
  original = os.urandom

  def urandom(size):
    asked.append(size)
    return original(size)

  monkeypatch.setattr(os, "urandom", urandom)
  np.random.seed(0)
  keys = []
  for _ in range(2):
    np.random.seed(0)  # the broken variant would repeat itself here
    keys.append(MasterKey.from_os())
  assert keys[0].secret != keys[1].secret
  assert all(len(key.secret) == 32 and not key.is_test for key in keys)


def test_a_key_from_numpys_global_state_is_caught():
  """What the test above would see: the same seed, the same key."""
  drawn = []
  for _ in range(2):
    np.random.seed(0)
    drawn.append(np.random.bytes(32))
  assert drawn[0] == drawn[1]


def test_keys_of_purposes_and_steps_differ_in_all_their_bits():
  master = MasterKey(bytes(range(32)))
  data = np.array([
    jax.random.key_data(step_key(master, purpose, step))
    for purpose in ("noise", "unit") for step in range(200)
  ])  # fmt: skip
  assert data.shape == (400, 2) and len(np.unique(data, axis=0)) == 400
  # jax.random.key(int) without x64 keeps 32 bits: its first word is always zero.
  assert len(np.unique(data[:, 0])) == len(np.unique(data[:, 1])) == 400
  narrow = np.array([jax.random.key_data(jax.random.key(step)) for step in range(5)])
  assert len(np.unique(narrow[:, 0])) == 1


def test_the_last_of_the_256_bits_matters():
  one, other = MasterKey(bytes(31) + b"\x00"), MasterKey(bytes(31) + b"\x01")
  assert one.derive("noise", 0, 8) != other.derive("noise", 0, 8)


def test_each_environment_has_its_own_keys_but_not_under_test():
  master = MasterKey(bytes(range(32)))
  assert for_environment(master, "a").secret != for_environment(master, "b").secret
  assert for_environment(master, "a").secret == for_environment(master, "a").secret
  test = MasterKey(bytes(range(32)), is_test=True)
  assert for_environment(test, "a") == test


def test_no_text_form_shows_the_secret():
  key = MasterKey(bytes(range(32)))
  for text in (repr(key), str(key), f"{key}", repr([key]), key.digest()):
    assert key.secret.hex() not in text and repr(key.secret) not in text


def test_a_key_file_must_be_private_and_marks_the_run(tmp_path):
  path = tmp_path / "key"
  path.write_text("ab" * 32 + "\n")
  path.chmod(0o644)
  with pytest.raises(ValueError, match="chmod 600"):
    MasterKey.from_file(path)
  path.chmod(0o600)
  assert MasterKey.from_file(path).is_test
  path.write_text("ab" * 31)
  with pytest.raises(ValueError, match="64"):
    MasterKey.from_file(path)
  with pytest.raises(ValueError, match="missing"):
    MasterKey.from_file(tmp_path / "missing")


def test_a_key_is_not_compiled_in():
  """A key that is closed over stands in the compiled program; one in the state does not."""
  key = jax.random.wrap_key_data(np.array([0xDEADBEEF, 0x0BADF00D], np.uint32))
  transform = dp_jax.gaussian_noise(1.0, key)
  state = transform.init(None)
  updates = {"w": jnp.zeros(4)}

  def text(function, *args):
    return jax.jit(function).lower(*args).as_text("hlo")

  def closed_over(updates):  # the broken variant
    return dp_jax.add_noise(updates, 1.0, key)

  words = (str(0xDEADBEEF), str(0x0BADF00D))
  assert not any(word in text(transform.update, updates, state) for word in words)
  assert all(word in text(closed_over, updates) for word in words)


def test_init_refuses_to_be_traced():
  transform = dp_jax.gaussian_noise(1.0, jax.random.key(0))
  for traced in (jax.jit(transform.init), jax.jit(jax.vmap(transform.init))):
    with pytest.raises(ValueError, match="traced"):
      traced(jnp.zeros(3))
  with pytest.raises(ValueError, match="traced"):
    jax.jit(lambda: transform.init(None))()
  assert transform.init(jnp.zeros(3)).count == 0
