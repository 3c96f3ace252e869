"""Privacy accounting, calibration, sampling and the ledger. Imports no JAX."""

from dp_jax.privacy.accounting.accountants import Accounted
from dp_jax.privacy.accounting.tails import GAUSSIAN_Z_MAX, SamplerTailError, tail_delta
from dp_jax.privacy.calibration.calibrate import calibrate, calibrate_rate, calibrate_steps
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import (
  FixedSize,
  FullBatch,
  Poisson,
  Sampler,
  Scheme,
  Stream,
  TruncatedPoisson,
  sampling_from_dict,
)
from dp_jax.privacy.spec import AccountantName, Adjacency, PrivacySpec

__all__ = [
  "GAUSSIAN_Z_MAX",
  "AccountantName",
  "Accounted",
  "Adjacency",
  "FixedSize",
  "FullBatch",
  "MasterKey",
  "Mechanism",
  "Poisson",
  "PrivacySpec",
  "Sampler",
  "SamplerTailError",
  "Scheme",
  "Stream",
  "TruncatedPoisson",
  "calibrate",
  "calibrate_rate",
  "calibrate_steps",
  "sampling_from_dict",
  "tail_delta",
]
