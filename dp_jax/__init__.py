"""Training and fine-tuning with differential privacy in JAX and Flax.

The names below are imported when first used, so that the privacy layer works without loading JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from dp_jax.gradients.clipping import ClippedGrad, clipped_grad
  from dp_jax.gradients.compensated import Compensated
  from dp_jax.gradients.ghost.explain import explain
  from dp_jax.gradients.noise.add_noise import add_noise
  from dp_jax.gradients.noise.optax_noise import gaussian_noise
  from dp_jax.gradients.optax_api import (
    differentially_private_aggregate,
    dp_adam,
    dp_lamb,
    dp_sgd,
  )
  from dp_jax.models.check_per_unit import check_per_unit
  from dp_jax.privacy.calibration.calibrate import calibrate
  from dp_jax.privacy.master_key import MasterKey
  from dp_jax.privacy.mechanism import Mechanism
  from dp_jax.privacy.sampling import FixedSize, FullBatch, Poisson, Stream, TruncatedPoisson
  from dp_jax.privacy.spec import PrivacySpec
  from dp_jax.training.release import Release, load_release
  from dp_jax.training.run import train

_EXPORTS = {
  "ClippedGrad": "gradients.clipping",
  "Compensated": "gradients.compensated",
  "FixedSize": "privacy.sampling",
  "FullBatch": "privacy.sampling",
  "MasterKey": "privacy.master_key",
  "Mechanism": "privacy.mechanism",
  "Poisson": "privacy.sampling",
  "PrivacySpec": "privacy.spec",
  "Release": "training.release",
  "Stream": "privacy.sampling",
  "TruncatedPoisson": "privacy.sampling",
  "add_noise": "gradients.noise.add_noise",
  "calibrate": "privacy.calibration.calibrate",
  "check_per_unit": "models.check_per_unit",
  "clipped_grad": "gradients.clipping",
  "differentially_private_aggregate": "gradients.optax_api",
  "dp_adam": "gradients.optax_api",
  "dp_lamb": "gradients.optax_api",
  "dp_sgd": "gradients.optax_api",
  "explain": "gradients.ghost.explain",
  "gaussian_noise": "gradients.noise.optax_noise",
  "load_release": "training.release",
  "train": "training.run",
}

__all__ = [
  "ClippedGrad",
  "Compensated",
  "FixedSize",
  "FullBatch",
  "MasterKey",
  "Mechanism",
  "Poisson",
  "PrivacySpec",
  "Release",
  "Stream",
  "TruncatedPoisson",
  "add_noise",
  "calibrate",
  "check_per_unit",
  "clipped_grad",
  "differentially_private_aggregate",
  "dp_adam",
  "dp_lamb",
  "dp_sgd",
  "explain",
  "gaussian_noise",
  "load_release",
  "train",
]


def __getattr__(name: str) -> Any:
  if name not in _EXPORTS:
    raise AttributeError(f"module 'dp_jax' has no attribute {name!r}")
  return getattr(importlib.import_module(f"dp_jax.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *_EXPORTS})
