"""Tensors from a PyTorch .pth file, without PyTorch and without running what the file says.

Such a file is a pickle, and a pickle can name any function to be called. The unpickler here knows
four harmless names and refuses every other, so that a file can hold arrays and nothing else. Both
layouts are read: the zip archive of PyTorch since 1.6, and the row of pickles from before.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dp_jax.errors import UserError

# The numbers at the head of the older layout (torch.serialization).
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001

_DTYPES = {
  "ByteStorage": "u1", "CharStorage": "i1", "ShortStorage": "<i2", "IntStorage": "<i4",
  "LongStorage": "<i8", "HalfStorage": "<f2", "FloatStorage": "<f4", "DoubleStorage": "<f8",
  "BoolStorage": "?",
}  # fmt: skip


class _Storage(NamedTuple):
  """The numbers behind tensors: `key` finds them in the file."""

  key: str
  dtype: str
  size: int


class _Tensor(NamedTuple):
  """A view of a storage, before its numbers are read."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def load_tensors(path: Path) -> dict[str, np.ndarray]:
  """Reads the tensors of a state dictionary by name.

  Args:
    path: a file that `torch.save(model.state_dict(), path)` wrote.

  Raises:
    ValueError: if the file is missing, truncated, in another format, or holds anything but
      tensors; nothing in it is run.
  """
  if not path.is_file():
    raise UserError(f"there is no weights file {str(path)!r}.")
  try:
    with path.open("rb") as file:
      if zipfile.is_zipfile(file):
        found, storages = _read_zip(file)
      else:
        file.seek(0)
        found, storages = _read_pickles(file)
    return {_name(name): _array(tensor, storages) for name, tensor in found.items()}
  except ValueError as error:
    raise UserError(f"{str(path)!r} is not a file of tensors alone: {error}") from error
  except Exception as error:  # what a malformed pickle or archive raises has no common type
    raise UserError(f"{str(path)!r} cannot be read: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
  """Makes ordered dictionaries, descriptions of tensors, and nothing else."""

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) == ("collections", "OrderedDict"):
      return OrderedDict
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
      return _tensor
    if module == "torch" and name in _DTYPES:
      return _DTYPES[name]  # a string: it can be neither called nor changed
    raise UserError(f"it refers to {module}.{name}, which is no tensor.")

  def persistent_load(self, pid: Any) -> _Storage:
    kind, dtype, key, _, size, *view = pid
    if kind != "storage" or dtype not in _DTYPES.values() or any(view):
      raise UserError(f"it refers to {kind!r} of type {dtype!r}, which is no storage.")
    return _Storage(str(key), dtype, int(size))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
  """Takes the arguments of torch's function of the same purpose."""
  del rest  # gradients and hooks
  shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
  if not isinstance(storage, _Storage) or len(shape) != len(strides):
    raise UserError("it describes a tensor without a storage.")
  if min((int(offset), *shape, *strides)) < 0:
    raise UserError("it describes a tensor of negative size.")
  return _Tensor(storage, int(offset), shape, strides)


def _read_zip(file: BinaryIO) -> tuple[Any, dict[str, bytes]]:
  with zipfile.ZipFile(file) as archive:
    names = archive.namelist()
    (root,) = (name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl"))
    order = f"{root}byteorder"
    if order in names and archive.read(order) != b"little":
      raise UserError("its numbers are big-endian.")
    found = _tensors(_Unpickler(io.BytesIO(archive.read(f"{root}data.pkl"))).load())
    keys = {tensor.storage.key for tensor in found.values()}
    return found, {key: archive.read(f"{root}data/{key}") for key in keys}


def _read_pickles(file: BinaryIO) -> tuple[Any, dict[str, bytes]]:
  if _Unpickler(file).load() != _MAGIC or _Unpickler(file).load() != _PROTOCOL:
    raise UserError("it has neither layout of PyTorch.")
  _Unpickler(file).load()  # the sizes of the writer's integers
  found = _tensors(_Unpickler(file).load())
  storages = {tensor.storage.key: tensor.storage for tensor in found.values()}
  contents = {}
  for key in _Unpickler(file).load():
    if str(key) not in storages:
      raise UserError(f"it has a storage {key!r} that no tensor uses.")
    storage = storages[str(key)]
    (size,) = struct.unpack("<q", file.read(8))
    if size != storage.size:
      raise UserError(f"storage {key} has {size} numbers, not {storage.size}.")
    contents[storage.key] = file.read(size * np.dtype(storage.dtype).itemsize)
  return found, contents


def _tensors(content: Any) -> dict[Any, _Tensor]:
  if not isinstance(content, dict):
    raise UserError(f"it holds a {type(content).__name__}, not a dictionary.")
  for name, value in content.items():
    if not isinstance(value, _Tensor):
      raise UserError(f"its entry {name!r} is a {type(value).__name__}, not a tensor.")
  return content


def _name(name: Any) -> str:
  if not isinstance(name, str):
    raise UserError(f"it has a tensor named {name!r}.")
  return name


def _array(tensor: _Tensor, storages: dict[str, bytes]) -> np.ndarray:
  """The tensor's numbers, as an array of its own."""
  dtype = np.dtype(tensor.storage.dtype)
  numbers = np.frombuffer(storages[tensor.storage.key], dtype)
  if len(numbers) != tensor.storage.size:
    raise UserError(f"a storage has {len(numbers)} numbers, not {tensor.storage.size}.")
  reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
  if math.prod(tensor.shape) and tensor.offset + reach >= len(numbers):
    raise UserError("a tensor reaches beyond its storage.")
  # Zero strides could make a small file describe an array of any size.
  if math.prod(tensor.shape) > len(numbers):
    raise UserError("a tensor has more entries than its storage.")
  strides = tuple(step * dtype.itemsize for step in tensor.strides)
  view = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides)
  return view.copy()
