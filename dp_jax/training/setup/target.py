"""From the privacy section of a configuration to the mechanism that meets its target."""

import math

from dp_jax.config.run_config import Config, PrivacyConfig
from dp_jax.errors import UserError
from dp_jax.gradients.noise.add_noise import check_stddev
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling.scheme import Scheme
from dp_jax.privacy.sampling.schemes import scheme_of
from dp_jax.privacy.spec import PrivacySpec


def make_mechanism(config: Config, num_units: int) -> tuple[PrivacySpec | None, Mechanism]:
  """The target (None without privacy), and the mechanism that meets it.

  Raises:
    ValueError: if the target cannot be met, or the scheme lacks a parameter or has one too many.
  """
  privacy = config.privacy
  whole = not scheme_of(privacy.sampling).SETTINGS  # its rate is 1 under every adjacency
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


def _sampling(config: Config, num_units: int) -> Scheme:
  """The sampling scheme; refuses parameters that the scheme does not use."""
  privacy = config.privacy
  given = {name: getattr(privacy, name) for name in ("sampling_rate", "expected_batch_size", "cap")}
  return scheme_of(privacy.sampling).from_settings(given, num_units)
