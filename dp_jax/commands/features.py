"""The command that turns images into features of a frozen public model."""

import json
import signal
from pathlib import Path

from absl import flags

from dp_jax.commands.base import Command, config_of, define_config, define_hosts, join_hosts
from dp_jax.config.features_config import FeaturesConfig
from dp_jax.errors import UserError


def _define(values: flags.FlagValues) -> None:
  define_config(values)
  flags.DEFINE_string("out", None, "folder of the features", flag_values=values)
  flags.DEFINE_bool("json", False, "print the manifest", flag_values=values)
  define_hosts(values)


def _features(values: flags.FlagValues, arguments: list[str]) -> int:
  from dp_jax.parallel.hosts import is_process_0, on_all_hosts
  from dp_jax.runs.extract_features import extract_features

  if arguments or not values["out"].value:
    raise UserError(f"give --out=DIR and no arguments (got {arguments}).")
  out = Path(values["out"].value)
  join_hosts(values)
  # Joined hosts leave SIGTERM to jax, which would let them go on. A shard is whole or not there, so
  # nothing is lost by ending at once.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  config = on_all_hosts(lambda: config_of(values, FeaturesConfig))
  manifest = extract_features(config, out)
  if not is_process_0():
    return 0
  splits = manifest["splits"]
  private = manifest["origin"]["declared"] == "private"  # then the number of records is not public
  if values["json"].value:
    origin = {k: v for k, v in manifest["origin"].items() if k != "source_sha256"}
    print(
      json.dumps({**manifest, "splits": list(splits), "origin": origin} if private else manifest)
    )
  else:
    counts = [name if private else f"{sum(each)} {name}" for name, each in splits.items()]
    print(f"{', '.join(counts)}: {manifest['input_shape'][0]} features each in {out}")
    print(f"train on them with --config.data.source=npy --config.data.path={out}")
  return 0


COMMANDS = {
  "features": Command(
    "Write the features that a frozen public model gives images; goes on where it was stopped.",
    "--config=FILE --out=DIR [--config.a.b=value ...]", _define, _features, kind=FeaturesConfig,
  ),
}  # fmt: skip
