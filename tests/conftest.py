"""Shared by all tests: eight virtual devices, and a compilation cache for the session."""

import os
import tempfile
from pathlib import Path

# Before jax is imported. Subprocesses of tests inherit it too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "dp_jax_tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="session")
def shared_data() -> Path:
  """The folder of real data beside the checkout; tests that need it skip where it is not."""
  folder = Path(__file__).parents[2] / "shared" / "data"
  if not folder.is_dir():
    pytest.skip(f"needs the real data in {folder.name}/, which is not part of the project")
  return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
  """Code that one process has compiled is there for the next; it holds no key."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    yield
