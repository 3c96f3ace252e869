"""The key that a run uses on the software and hardware where it runs."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax

from dp_jax.parallel.hosts import code_version
from dp_jax.privacy.master_key import MasterKey

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
# Settings of jax that change random bits or rounding.
_SETTINGS = (
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  "jax_enable_x64",
  "jax_default_matmul_precision",
)


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


def environment() -> str:
  """The software, our own source included, and hardware that rounding depends on."""
  devices = jax.devices()
  packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
  kind = f"{len(devices)} x {devices[0].platform} {devices[0].device_kind}"
  settings = ", ".join(f"{name}={getattr(jax.config, name)}" for name in _SETTINGS)
  flags = " ".join(os.environ.get(name, "") for name in ("XLA_FLAGS", "NPY_DISABLE_CPU_FEATURES"))
  cpu = f"{platform.machine()} {_cpu_model()}"
  return ", ".join([code_version(), packages, kind, cpu, settings, flags])


def _cpu_model() -> str:
  """A short digest of the CPU's description: compiled code, and so rounding, depends on it."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  kept = sorted({line for line in lines if line.startswith(("model name", "flags"))})
  return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12]
