"""Shared by all tests: eight virtual devices, and a compilation cache for the session."""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before jax is imported. Subprocesses of tests inherit it too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from made_up_runs import bound, make_facts

from dp_jax.statement import privacy_json

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


@pytest.fixture(name="facts")
def _facts() -> Callable[..., privacy_json.ReleaseFacts]:
  """Facts of a run, with fields replaced by keyword."""
  return make_facts


@pytest.fixture(name="shared_record", scope="session")
def _shared_record() -> dict[str, Any]:
  return bound(privacy_json.privacy_record(make_facts()))


@pytest.fixture(name="record")
def _record(shared_record: dict[str, Any]) -> dict[str, Any]:
  """A valid privacy record on data declared public; a copy, to change at will."""
  return copy.deepcopy(shared_record)
