"""Weights on disk: safetensors files with the model's description in their header."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays

_HEADER = "dp_jax"


def to_bytes(
  arrays: Arrays, spec: ModelSpec, *, protected: bool = False, declared: str = "private"
) -> bytes:
  """Serialises arrays by name; the same arrays give the same bytes.

  Args:
    arrays: by name.
    spec: what rebuilds the model.
    protected: whether a privacy guarantee covers the arrays.
    declared: what the data behind them was declared to be.
  """
  about = {"model": spec.to_json(), "protected": protected, "declared": declared}
  # One key: safetensors writes several in an order that changes from call to call.
  header = {_HEADER: json.dumps(about, sort_keys=True)}
  return save({name: np.asarray(x) for name, x in arrays.items()}, header)


def load(path: Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
  """Reads the model and the arrays that `to_bytes` wrote.

  Raises:
    ValueError: if the file is missing, not a safetensors file, or describes no model.
  """
  about, arrays = _read(path)
  if "model" not in about:
    raise ValueError(f"{str(path)!r} has no model description in its header.")
  return ModelSpec.from_json(about["model"]), arrays


def starting_warnings(path: Path) -> tuple[str, ...]:
  """What the statement of a run that starts from these weights must add.

  Raises:
    ValueError: if they were trained without privacy on data declared private: as starting weights
      they would carry those records into the release.
  """
  about, _ = _read(path)
  if about.get("declared") == "public":
    return ()
  if about.get("protected") is True:
    return (
      "the starting weights are a private release themselves: if a person is in the data of both,"
      " the guarantees add up",
    )
  if about.get("protected") is False:
    raise ValueError(
      f"{str(path)!r} was trained without privacy on data declared private; starting from it would"
      " carry those records into the release. Use public weights, or a private release."
    )
  return ("that the starting weights are public is taken from the configuration",)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """What the header says of the arrays (empty for a file of other origin), and the arrays."""
  if not path.is_file():
    raise ValueError(f"there is no weights file {str(path)!r}.")
  try:
    with safe_open(path, framework="numpy") as file:
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
      header = (file.metadata() or {}).get(_HEADER, "{}")
  except SafetensorError as error:
    raise ValueError(f"{str(path)!r} is not a safetensors file: {error}.") from error
  try:
    about = json.loads(header)
  except json.JSONDecodeError as error:
    raise ValueError(f"the header of {str(path)!r} is not JSON: {error}.") from error
  return (about if isinstance(about, dict) else {}), arrays


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
    raise ValueError(f"the weights {path!r} do not fit the model: {'; '.join(problems)}.")
