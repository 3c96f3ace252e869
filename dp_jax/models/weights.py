"""Weights on disk: safetensors files with the model's description in their header."""

import hashlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import Arrays


def to_bytes(arrays: Arrays, spec: ModelSpec) -> bytes:
  """Serialises arrays by name; the same arrays give the same bytes."""
  return save({name: np.asarray(x) for name, x in arrays.items()}, {"model": spec.to_json()})


def load(path: Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
  """Reads what `to_bytes` wrote.

  Raises:
    ValueError: if the file is missing, not a safetensors file, or describes no model.
  """
  if not path.is_file():
    raise ValueError(f"there is no weights file {str(path)!r}.")
  try:
    with safe_open(path, framework="numpy") as file:
      metadata = file.metadata() or {}
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no iterator
  except SafetensorError as error:
    raise ValueError(f"{str(path)!r} is not a safetensors file: {error}.") from error
  if "model" not in metadata:
    raise ValueError(f"{str(path)!r} has no model description in its header.")
  return ModelSpec.from_json(metadata["model"]), arrays


def initialise_from(arrays: Arrays, path: Path) -> tuple[Arrays, str]:
  """Replaces initial arrays by those of a weights file, all of them.

  Returns:
    The arrays, and the sha256 of the file in hexadecimal.

  Raises:
    ValueError: if names or shapes do not match, naming each.
  """
  _, loaded = load(path)
  problems = [f"{name} is missing" for name in arrays if name not in loaded]
  problems += [f"{name} is not in the model" for name in loaded if name not in arrays]
  problems += [
    f"{name} has shape {loaded[name].shape}, the model {arrays[name].shape}"
    for name in arrays
    if name in loaded and loaded[name].shape != arrays[name].shape
  ]
  if problems:
    raise ValueError(f"the weights {str(path)!r} do not fit the model: {'; '.join(problems)}.")
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  return {name: jnp.asarray(loaded[name], x.dtype) for name, x in arrays.items()}, digest
