"""Sampling schemes: which units a step uses, what that costs, and how it is said."""

from dp_jax.privacy.sampling.fixed_size import FixedSize
from dp_jax.privacy.sampling.full_batch import FullBatch
from dp_jax.privacy.sampling.poisson import Poisson
from dp_jax.privacy.sampling.sampler import Sampler
from dp_jax.privacy.sampling.scheme import Scheme
from dp_jax.privacy.sampling.schemes import sampling_from_dict
from dp_jax.privacy.sampling.stream import Stream
from dp_jax.privacy.sampling.truncated_poisson import TruncatedPoisson

__all__ = [
  "FixedSize",
  "FullBatch",
  "Poisson",
  "Sampler",
  "Scheme",
  "Stream",
  "TruncatedPoisson",
  "sampling_from_dict",
]
