"""From the privacy section of a configuration to the mechanism that meets its target."""

import math

from dp_jax.config.run_config import Config, PrivacyConfig
from dp_jax.errors import UserError
from dp_jax.gradients.noise.add_noise import check_stddev
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import (
  FixedSize,
  FullBatch,
  Poisson,
  Sampling,
  Stream,
  TruncatedPoisson,
)
from dp_jax.privacy.spec import PrivacySpec


def make_mechanism(config: Config, num_units: int) -> tuple[PrivacySpec | None, Mechanism]:
  """The target (None without privacy), and the mechanism that meets it.

  Raises:
    ValueError: if the target cannot be met, or the scheme lacks a parameter or has one too many.
  """
  privacy = config.privacy
  whole = privacy.sampling == "full_batch"  # its rate is 1 under every adjacency
  declared = privacy.expected_batch_size is not None and (
    whole or privacy.sampling_rate is not None
  )
  if privacy.adjacency == "add_or_remove_one" and not declared:
    raise UserError(
      "adjacency add_or_remove_one keeps the number of units secret, so rate and divisor may not"
      " be derived from it: declare both privacy.sampling_rate and privacy.expected_batch_size,"
      " or use zero_out."
    )
  if declared and privacy.adjacency != "add_or_remove_one":
    raise UserError(_two_sizes(privacy))
  divisor = privacy.expected_batch_size if declared else None
  sampling = _sampling(config, num_units)
  steps = config.train.steps
  if steps is None:
    steps = max(1, math.ceil((config.train.epochs or 0) / sampling.sampling_rate))
  if not privacy.enabled:
    plain = Mechanism(
      sampling, 0.0, steps, adjacency=privacy.adjacency, declared_batch_size=divisor
    )
    return None, plain
  spec = make_spec(config)
  mechanism = calibrate(spec, sampling, steps, privacy.clip_norm, divisor)
  check_stddev(mechanism.stddev)
  return spec, mechanism


def _two_sizes(privacy: PrivacyConfig) -> str:
  """What to say where the divisor would be another number than the units that a step draws."""
  size, adjacency = privacy.expected_batch_size, privacy.adjacency
  if privacy.sampling_rate is None:
    return (
      f"privacy.expected_batch_size={size} has no meaning under sampling {privacy.sampling!r}: each"
      f" step takes all units, whose number is public under {adjacency}. Leave it out"
      " (--config.privacy.expected_batch_size=none)."
    )
  return (
    f"privacy.sampling_rate={privacy.sampling_rate} and privacy.expected_batch_size={size} both say"
    f" how many units a step draws, where {adjacency} makes their number public: set one of them;"
    " --config.privacy.sampling_rate=none unsets what a file sets."
  )


def make_spec(config: Config) -> PrivacySpec:
  """The target of a private run.

  Raises:
    ValueError: if epsilon or delta are not set, or out of range.
  """
  privacy = config.privacy
  if privacy.epsilon is None or privacy.delta is None:
    raise UserError("set privacy.epsilon and privacy.delta, or privacy.enabled=False.")
  return PrivacySpec(
    privacy.epsilon, privacy.delta, privacy.unit, privacy.adjacency, privacy.accountant
  )


def _sampling(config: Config, num_units: int) -> Sampling:
  """The sampling scheme; refuses parameters that the scheme does not use."""
  privacy = config.privacy
  name, rate, size, cap = (
    privacy.sampling, privacy.sampling_rate, privacy.expected_batch_size, privacy.cap
  )  # fmt: skip
  if cap is not None and name != "truncated_poisson":
    raise UserError(f"privacy.cap={cap} has no meaning under sampling {name!r}.")
  if name in ("poisson", "truncated_poisson"):
    if rate is None:
      if size is None:
        raise UserError(f"sampling {name!r} needs privacy.sampling_rate or expected_batch_size.")
      rate = size / num_units
    if name == "poisson":
      return Poisson(rate)
    if cap is None:
      raise UserError("sampling 'truncated_poisson' needs privacy.cap.")
    return TruncatedPoisson(rate, cap, num_units)
  if rate is not None:
    raise UserError(f"privacy.sampling_rate={rate} has no meaning under sampling {name!r}.")
  if name == "full_batch":
    return FullBatch()
  if name not in ("fixed_size", "stream"):
    raise UserError(
      f"privacy.sampling={name!r} is not one of poisson, full_batch, truncated_poisson,"
      " fixed_size, stream."
    )
  if size is None or size != int(size):
    raise UserError(f"sampling {name!r} needs a whole privacy.expected_batch_size, got {size}.")
  return (FixedSize if name == "fixed_size" else Stream)(int(size), num_units)
