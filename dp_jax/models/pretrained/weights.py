"""Weights on disk: safetensors files with the model's description in their header.

The header says also whether a guarantee covers the arrays, and what they came from
(`dp_jax.models.pretrained.ancestry`). Arrays that are saved by other code lose that: where
they are started from, the statement says that nothing is known of them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dp_jax.errors import UserError
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays
from dp_jax.models.pretrained.ancestry import Ancestor, Lineage, lineage_of, to_list, warnings_of

_HEADER = "dp_jax"


def to_bytes(
  arrays: Arrays,
  spec: ModelSpec,
  *,
  protected: bool = False,
  declared: str = "private",
  test_key: bool = False,
  guarantee: Mapping[str, Any] | None = None,
  ancestry: Sequence[Ancestor] | None = None,
) -> bytes:
  """Serialises arrays by name; the same arrays give the same bytes.

  Args:
    arrays: by name.
    spec: what rebuilds the model.
    protected: whether a privacy guarantee covers the arrays.
    declared: what the data behind them was declared to be.
    test_key: whether their noise came from a key file given for a test.
    guarantee: epsilon, delta, unit and adjacency of what covers them.
    ancestry: the weights that they came from, newest first, with all that is behind those
      (`lineage`); () if they came from none. None says that this is not known: whoever starts from
      the file is told so.
  """
  about: dict[str, Any] = {"model": spec.to_json(), "protected": protected, "declared": declared}
  if test_key:
    about["test_key"] = True
  if guarantee is not None:
    about["guarantee"] = dict(guarantee)
  if ancestry is not None:
    about["ancestry"] = to_list(ancestry)
  # One key: safetensors writes several in an order that changes from call to call.
  header = {_HEADER: json.dumps(about, sort_keys=True)}
  return save({name: np.asarray(x) for name, x in arrays.items()}, header)


def load(path: Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
  """Reads the model and the arrays that `to_bytes` wrote.

  Saved again by other code, they are weights of which nothing is known: `lineage` gives what to
  hand to `to_bytes`.

  Raises:
    ValueError: if the file is missing, not a safetensors file, or describes no model.
  """
  about, arrays = _read(path)
  if "model" not in about:
    raise UserError(f"{str(path)!r} has no model description in its header.")
  return ModelSpec.from_json(about["model"]), arrays


def lineage(path: Path) -> Lineage:
  """A weights file and all weights behind it, newest first: the ancestry of what starts from it.

  Raises:
    ValueError: if it is no weights file, or its header does not say what `to_bytes` writes.
  """
  about, _ = _read(path)
  return lineage_of(about, hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


def starting_warnings(path: Path) -> tuple[str, ...]:
  """What the statement of a run that starts from these weights must add.

  Raises:
    ValueError: if they, or weights behind them, were trained without privacy, or with a test key,
      on data declared private: as starting weights they would carry those records into the release.
  """
  return warnings_of(lineage(path))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """What the header says of the arrays (empty for a file of other origin), and the arrays."""
  if not path.is_file():
    raise UserError(f"there is no weights file {str(path)!r}.")
  try:
    with safe_open(path, framework="numpy") as file:
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
      header = (file.metadata() or {}).get(_HEADER, "{}")
  except SafetensorError as error:
    raise UserError(f"{str(path)!r} is not a safetensors file: {error}.") from error
  except (AttributeError, KeyError, TypeError) as error:  # a dtype that NumPy does not have
    raise UserError(f"{str(path)!r} holds arrays that cannot be read: {error}.") from error
  try:
    about = json.loads(header)
  except (ValueError, RecursionError) as error:
    raise UserError(f"the header of {str(path)!r} is not JSON: {error}.") from error
  if not isinstance(about, dict):
    raise UserError(f"the header of {str(path)!r} holds no JSON object under {_HEADER!r}.")
  return about, arrays


def initialise_from(arrays: Arrays, path: Path) -> tuple[Arrays, str]:
  """Replaces initial arrays by those of a weights file, all of them.

  Returns:
    The arrays, and the sha256 of the file in hexadecimal.

  Raises:
    ValueError: if names or shapes do not match, naming each.
  """
  _, loaded, digest = load_with_digest(path)
  check_fit(arrays, loaded, str(path))
  return {name: jnp.asarray(loaded[name], x.dtype) for name, x in arrays.items()}, digest


def load_with_digest(path: Path) -> tuple[ModelSpec, Arrays, str]:
  """The model, its arrays, and the sha256 of the file in hexadecimal.

  Raises:
    ValueError: as `load`.
  """
  spec, loaded = load(path)
  arrays = {name: jnp.asarray(value) for name, value in sorted(loaded.items())}
  return spec, arrays, hashlib.sha256(path.read_bytes()).hexdigest()


def check_fit(arrays: Arrays, loaded: Arrays, path: str) -> None:
  """Refuses loaded arrays that are not those of a model.

  Raises:
    ValueError: naming each difference.
  """
  problems = [f"{name} is missing" for name in arrays if name not in loaded]
  problems += [f"{name} is not in the model" for name in loaded if name not in arrays]
  problems += [
    f"{name} has shape {loaded[name].shape}, the model {arrays[name].shape}"
    for name in arrays
    if name in loaded and loaded[name].shape != arrays[name].shape
  ]
  if problems:
    raise UserError(f"the weights {path!r} do not fit the model: {'; '.join(problems)}.")
