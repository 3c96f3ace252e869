"""What a configuration says of a source: the keys that are its own, and what all sources share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dp_jax.data.sources.source import Source
from dp_jax.errors import UserError


@dataclass(frozen=True)
class Context:
  """What any source may need to know beside its own options.

  Attributes:
    source: what data.source is, of which some have more to say than which kind it is (tfds:NAME).
    path: the file or folder.
    seed: picks the split or the drawings of sources that have a choice.
    num_records: reads only the first so many, or says how many to make.
    input_shape: of a record, to which encoded images are brought.
    value_range: (low, high) of the inputs, for a source that cannot say it.
    class_names: where the options name no classes, those of another split or of a model, so that
      all number them alike.
    eval_split: the name of the held-out split.
    unit: the column of units; None where each record is its own.
    missing_values: texts that stand for no value, in place of the usual ones.
    labelled: False does without the labels, for predictions on people of whom none are known.
  """

  source: str = ""
  path: str | None = None
  seed: int = 0
  num_records: int | None = None
  input_shape: tuple[int, ...] | None = None
  value_range: tuple[float, ...] | None = None
  class_names: tuple[str, ...] | None = None
  eval_split: str = "test"
  unit: str | None = None
  missing_values: tuple[str, ...] | None = None
  labelled: bool = True

  def required_path(self, what: str) -> str:
    """The path; a UserError that names `what` it must be if there is none."""
    if not self.path:
      kind = self.source.partition(":")[0]
      raise UserError(f"the {kind} source needs a path: set data.path to {what}")
    return self.path


@dataclass(frozen=True)
class SourceOptions:
  """The keys of the data section that one source alone understands; this one has none.

  Each source has a subclass, whose fields are its keys. It is made before other keys are known, and
  again with what a trained model says: so it refuses what no other key could mend, and `open` the
  rest.
  """

  # Whether data.num_records is how many to make, and no cut of those that there are.
  MAKES_RECORDS = False
  # Whether it has a file or folder, data.path.
  READS_PATH = True
  # Whether its cells are texts, of which data.missing_values says which stand for no value.
  READS_TEXT = False
  # Of a format of a user's own files, what these hold; of a data set, nothing.
  HOLDS = ""

  def open(self, split: str, context: Context) -> Source:
    """Opens a split.

    Raises:
      UserError: if it is not there, or malformed, or keys contradict each other. What may be a
        record's, a name in a first line or of a folder, is the detail of a DataError.
    """
    raise NotImplementedError

  def inputs(self) -> dict[str, Any]:
    """By key: which columns are the inputs, and their scale. Other values are other inputs."""
    return {}

  def decoding(self) -> dict[str, Any]:
    """By key: how encoded images become inputs; empty where none are decoded."""
    return {}

  def reading(self) -> dict[str, Any]:
    """By key: all that says how records become inputs and labels, which a model keeps."""
    return {**self.inputs(), **self.decoding()}

  def facts(self) -> dict[str, Any]:
    """What is declared of the records, and so public, for the statement."""
    return self.decoding()

  def code(self, source: str) -> dict[str, Any] | None:
    """Of code of other people, what is recorded of it; `source` is what data.source is."""
    return None

  def held_out_by(self, seed: int, unit: str) -> list[Any] | None:
    """What decides which records are held out, where the source itself divides them."""
    return None
