"""What a run starts from: its weights, and the models that made its features."""

from pathlib import Path

from dp_jax.config.run_config import Config
from dp_jax.data.sources.source import Source
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import Lineage, merged, of_features, warnings_of
from dp_jax.training.setup.open_data import model_of_features
from dp_jax.training.setup.public_features import PublicFeatures


def ancestry(config: Config, source: Source, public: PublicFeatures | None) -> Lineage:
  """All weights behind what a run writes, for the header of its files.

  Args:
    config: of the run.
    source: the training records, which may be features.
    public: of solver.public_features.

  Raises:
    ValueError: if a header or manifest does not say what this project writes.
  """
  return merged(*_lineages(config, source, public))


def weights_warnings(
  config: Config, source: Source, public: PublicFeatures | None
) -> tuple[str, ...]:
  """What the statement of a private run must say of them.

  A run without privacy may start from anything: its file is told what.

  Raises:
    ValueError: if they would carry private records into a private release.
  """
  if not config.privacy.enabled:
    return ()
  found = [text for each in _lineages(config, source, public) for text in warnings_of(each)]
  noted = () if public is None else public.warnings
  return tuple(dict.fromkeys((*found, *model_of_features(source)[1], *noted)))


def exposure_warnings(config: Config, behind: Lineage) -> tuple[str, ...]:
  """What a run without privacy is told of private records in what it starts from."""
  exposed = any(each.is_exposed for each in behind)
  if config.privacy.enabled or config.data.declared == "private" or not exposed:
    return ()
  return (
    "the starting weights hold records declared private that no guarantee protects: what this run"
    " leaves is as private as those, though its own data are declared public",
  )


def _lineages(config: Config, source: Source, public: PublicFeatures | None) -> list[Lineage]:
  file = config.model.weights
  own = () if file is None else weights.lineage(Path(file))
  return [own, of_features(source.info.origin), () if public is None else public.ancestry]
