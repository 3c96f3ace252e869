"""The parameters of a release, by the header of their file: what they are said to be.

The header is read as JSON, so that nobody needs jax to verify a release.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dp_jax.errors import UserError
from dp_jax.models.pretrained.ancestry import GUARANTEE, lineage_of, warnings_about
from dp_jax.statement import manifest

# A header lists names and shapes; one beyond this is not one of ours.
_MAX_HEADER_BYTES = 64 * 1024 * 1024
# Bytes of a number of each type that safetensors stores.
_BYTES = {
  **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
  **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
  **dict.fromkeys(("U32", "I32", "F32"), 4),
  **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# The key of the metadata under which the project describes arrays, as
# `dp_jax.models.pretrained.weights` writes them.
_OURS = "dp_jax"
# What the header says of the model that is no fact about records.
_NO_FACTS = ("name", "sizes", "reading")
# The facts of the tasks of dp_jax.
_BUILT_IN = ("input_shape", "num_classes", "value_range", "class_names", "multilabel")


def problems(path: Path, record: Mapping[str, Any]) -> list[str]:
  """What contradicts the record in a file of parameters, one line each.

  Args:
    path: of the safetensors file.
    record: the content of privacy.json, which the schema accepts.
  """
  try:
    count, metadata = _read(path)
    digest = manifest.sha256(path)
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    return [f"{path.name} cannot be read as safetensors ({error})"]
  stated, found = record["parameters"], []
  if count != stated["total"]:
    found.append(f"parameters.total is {stated['total']}, but {path.name} holds {count} numbers")
  if digest != stated["sha256"]:
    found.append(f"{path.name} is not the file whose SHA-256 is parameters.sha256")
  try:
    about = manifest.parse_json(metadata.get(_OURS, "{}"))
    model = manifest.parse_json(about.get("model", "{}"))
    return [*found, *_contradictions(about, model, record), *_ancestors(about, record)]
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    return [*found, f"the header of {path.name} cannot be read ({error})"]


def _contradictions(
  about: Mapping[str, Any], model: Mapping[str, Any], record: Mapping[str, Any]
) -> Iterator[str]:
  """Where the header says something else of the same thing than the record."""
  if about.get("protected") is not True:
    yield "the parameters say of themselves that no guarantee covers them"
  test_key = about.get("test_key", False)
  if test_key != record["randomness"]["test_key"]:
    yield f"randomness.test_key is {record['randomness']['test_key']}, but {test_key} in the header"
  if about.get("declared") != record["declared"]:
    yield f"declared is {record['declared']!r}, but {about.get('declared')!r} in the header"
  guarantee = {name: record[name] for name in GUARANTEE}
  if about.get("guarantee") != guarantee:
    yield f"the guarantee in the header, {about.get('guarantee')}, is not that of the record"
  facts = {name: value for name, value in model.items() if name not in _NO_FACTS}
  said = {**model.get("reading", {}), **facts}
  public = record["treated_as_public"]
  for name in sorted(said.keys() & public.keys()):
    if said[name] != public[name]:
      yield f"treated_as_public.{name} is not what the header of the parameters says"
  for name in sorted({*facts, *(() if "task" in facts else _BUILT_IN)}):
    if name not in said or name not in public:
      yield f"{name} has to stand in treated_as_public and in the header of the parameters"


def _ancestors(about: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[str]:
  """What the chain of weights behind the parameters demands of the record."""
  behind = lineage_of(about, "0" * 64, "params.safetensors")[1:]
  stated = record["pretrained_weights"]
  # Weights that made public features are behind the parameters too, and stand with those features.
  if behind and stated is None and "public_features" not in record["treated_as_public"]:
    yield "pretrained_weights is null, but the header names the weights that training started from"
  digests = [each.sha256 for each in behind if each.sha256 is not None]
  if digests and stated and not any(digest in stated for digest in digests):
    yield "pretrained_weights does not name the weights that the header does"
  for each in behind:
    if each.is_exposed:
      yield "the header names weights that hold private records without protection"
    # As the weights that training started from, or as what is behind those: the header has them all
    # in one list.
    for first, further in zip(warnings_about(each, 0), warnings_about(each, 1), strict=True):
      if first not in record["warnings"] and further not in record["warnings"]:
        yield f"warnings leaves out: {further}"


def count_parameters(path: Path) -> int:
  """How many numbers a safetensors file holds, by its header, which its size must bear out.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not a safetensors file, or longer or shorter than its header says.
  """
  return _read(path)[0]


def _read(path: Path) -> tuple[int, dict[str, Any]]:
  """The count, and the metadata of the header.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not a safetensors file, or longer or shorter than its header says.
  """
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= _MAX_HEADER_BYTES:
      raise UserError(f"its header claims {size} bytes")
    header = manifest.parse_json(file.read(size).decode("utf-8"))
    rest = file.seek(0, os.SEEK_END) - 8 - size
  if not isinstance(header, dict):
    raise UserError("its header is not an object")
  total, end = 0, 0
  tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
  for tensor in sorted(tensors, key=lambda each: each["data_offsets"]):
    number = math.prod(_length(each) for each in tensor["shape"])
    start, stop = tensor["data_offsets"]
    if start != end or stop - start != number * _BYTES[tensor["dtype"]]:
      raise UserError("shapes, types and offsets in its header do not fit together")
    total, end = total + number, stop
  if end != rest:
    raise UserError(f"it holds {rest} bytes of numbers, where its header has {end}")
  metadata = header.get("__metadata__", {})
  if not isinstance(metadata, dict):
    raise UserError("its metadata are not an object")
  return total, metadata


def _length(value: Any) -> int:
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise UserError(f"{value!r} is not a length")
  return value
