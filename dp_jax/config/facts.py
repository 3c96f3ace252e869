"""What a configuration says of one data set, and is not true of others.

A file in `configs/` is written for some data and used as a template for others. That its data are
public, or how its settings were chosen, is then about other people's records: so such facts name
the data that they are about, and hold for these alone.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from dp_jax.config.data_config import DataConfig
from dp_jax.errors import UserError

# Sections whose keys are chosen for a result, and the keys of them that change none or are no
# choice; of the section privacy those that are.
_CHOSEN = ("model", "solver", "task", "train")
_NO_CHOICE = ("train.engine", "train.memory_budget", "train.microbatch_size", "train.tensorboard")
_OF_PRIVACY = (
  "sampling", "sampling_rate", "expected_batch_size", "cap", "clipping", "clip_norm"
)  # fmt: skip


def set_anew(chosen: str, keys: Iterable[str]) -> str:
  """How settings were chosen, less those that flags set anew: of these it is not known.

  Args:
    chosen: a sentence without a full stop.
    keys: section.name of what was given by flags.
  """
  names = sorted(
    key for key in {*keys} - {*_NO_CHOICE}
    if key.split(".")[0] in _CHOSEN or key.removeprefix("privacy.") in _OF_PRIVACY
  )  # fmt: skip
  if not names:
    return chosen
  were = "was" if len(names) == 1 else "were"
  return f"{chosen}; for this run {', '.join(names)} {were} set anew, how is not recorded"


@dataclasses.dataclass(frozen=True)
class FactsConfig:
  """Facts about the data of one source, or of one file.

  Attributes:
    source: what data.source is then; left out, there are no facts.
    sha256: of the file data.path, in hexadecimal; left out, the source alone says which data it is.
    declared: what data.declared is by default.
    hyperparameter_selection: what privacy.hyperparameter_selection is by default.
  """

  source: str | None = None
  sha256: str | None = None
  declared: Literal["private", "public"] | None = None
  hyperparameter_selection: str | None = None

  def hold(self, data: DataConfig) -> bool:
    """Whether these are the data that the facts are about."""
    if self.source is None or self.source != data.source:
      return False
    if self.sha256 is None:
      return True
    path = Path(data.path or "")
    if not path.is_file():
      return False
    with path.open("rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

  def declared_of(self, data: DataConfig) -> Literal["private", "public"]:
    """What the data are declared to be where the configuration does not say.

    Raises:
      ValueError: if these are other data than those that the configuration declares.
    """
    if self.declared is None:
      return data.declared
    if not self.hold(data):
      about = self.source if self.sha256 is None else f"a file of sha256 {self.sha256[:16]}..."
      raise UserError(
        f"this configuration declares {about} to be {self.declared}, and"
        f" data.source={data.source!r}, data.path={data.path!r} are other data: say"
        " --config.data.declared=private, or public if everything about them may be shown."
      )
    return self.declared
