"""Tensors from .pth files: both layouts, and nothing but tensors."""

import io
import os
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from dp_jax.models.pretrained.torch_weights import load_tensors


class _Tensor:
  """Pickles as torch pickles a tensor: a call of torch's function on a storage."""

  def __init__(self, key, array, offset=0, shape=None, strides=None):
    self.key, self.array, self.offset = key, array, offset
    self.shape = array.shape if shape is None else shape
    steps = [step // array.itemsize for step in array.strides]
    self.strides = tuple(steps) if strides is None else strides

  def __reduce__(self):
    rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
    arguments = (_Storage(self), self.offset, self.shape, self.strides, False, OrderedDict())
    return rebuild, arguments


class _Storage:
  def __init__(self, tensor):
    self.tensor = tensor


class _Pickler(pickle.Pickler):
  def persistent_id(self, value):
    if not isinstance(value, _Storage):
      return None
    tensor = value.tensor
    kind = getattr(sys.modules["torch"], tensor.array.dtype.metadata["storage"])
    return ("storage", kind, tensor.key, "cpu", tensor.array.size, *self.view)

  view = ()


@pytest.fixture
def torch_names(monkeypatch):
  """Names that a pickle can refer to, as if torch were there."""
  torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
  for name in ("FloatStorage", "LongStorage", "HalfStorage"):
    setattr(torch, name, type(name, (), {"__module__": "torch"}))

  def _rebuild_tensor_v2():
    raise AssertionError("only its name is used")

  _rebuild_tensor_v2.__module__ = "torch._utils"
  _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
  utils._rebuild_tensor_v2 = _rebuild_tensor_v2
  torch._utils = utils
  monkeypatch.setitem(sys.modules, "torch", torch)
  monkeypatch.setitem(sys.modules, "torch._utils", utils)


def _array(values, storage="FloatStorage", dtype="<f4"):
  return np.asarray(values, np.dtype(dtype, metadata={"storage": storage}))


def _tensors():
  return {
    "weight": _Tensor("1", _array(np.arange(6).reshape(2, 3))),
    "half": _Tensor("2", _array([1.5, -2.0], "HalfStorage", "<f2")),
    "count": _Tensor("3", _array(7, "LongStorage", "<i8")),
  }


def _pickled(content, view=()):
  buffer = io.BytesIO()
  pickler = _Pickler(buffer, protocol=2)
  pickler.view = view
  pickler.dump(content)
  return buffer.getvalue()


def _zip(path, content, storages):
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("model/data.pkl", _pickled(content))
    for key, array in storages.items():
      archive.writestr(f"model/data/{key}", array.tobytes())
  return path


def _rows_of_pickles(path, content, storages):
  parts = [pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
  parts += [_pickled(content, view=(None,)), pickle.dumps(list(storages), 2)]
  for array in storages.values():
    parts += [struct.pack("<q", array.size), array.tobytes()]
  path.write_bytes(b"".join(parts))
  return path


LAYOUTS = [_zip, _rows_of_pickles]


@pytest.mark.parametrize("write", LAYOUTS)
def test_both_layouts_give_the_arrays_back(torch_names, tmp_path, write):
  tensors = OrderedDict(_tensors())
  path = write(tmp_path / "model.pth", tensors, {t.key: t.array for t in tensors.values()})
  loaded = load_tensors(path)
  assert list(loaded) == ["weight", "half", "count"]
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(loaded[name], tensor.array)
    assert loaded[name].dtype == tensor.array.dtype and loaded[name].shape == tensor.array.shape


@pytest.mark.parametrize("write", LAYOUTS)
def test_views_share_a_storage(torch_names, tmp_path, write):
  whole = _array(np.arange(6))
  tensors = {
    "transposed": _Tensor("1", whole, shape=(3, 2), strides=(1, 3)),
    "end": _Tensor("1", whole, offset=4, shape=(2,), strides=(1,)),
  }
  loaded = load_tensors(write(tmp_path / "model.pth", tensors, {"1": whole}))
  np.testing.assert_array_equal(loaded["transposed"], np.arange(6).reshape(2, 3).T)
  np.testing.assert_array_equal(loaded["end"], [4, 5])


class _Command:
  """Runs a command when it is unpickled in the ordinary way."""

  def __init__(self, call, *arguments):
    self.call, self.arguments = call, arguments

  def __reduce__(self):
    return self.call, self.arguments


@pytest.mark.parametrize("write", LAYOUTS)
@pytest.mark.parametrize("call", [os.system, eval, getattr], ids=["system", "eval", "getattr"])
def test_a_file_that_would_run_something_is_refused_and_nothing_runs(
  torch_names, tmp_path, write, call
):
  mark = tmp_path / "mark"
  arguments = {
    os.system: (f"touch {mark}",),
    eval: (f"open({str(mark)!r}, 'w')",),
    getattr: (_Command(eval, f"open({str(mark)!r}, 'w')"), "close"),
  }[call]
  evil = {"weight": _Command(call, *arguments)}
  # The ordinary way does run it.
  with_effect = _pickled(evil)
  pickle.loads(with_effect)
  assert mark.exists()
  mark.unlink()
  path = write(tmp_path / "model.pth", evil, {})
  with pytest.raises(ValueError, match="refers to"):
    load_tensors(path)
  assert not mark.exists()


@pytest.mark.parametrize("content", [
  [1, 2], {"weight": {"inner": 3}}, {"weight": 3.0}, {"weight": np.float64(1.0)}, {3: None},
], ids=str)  # fmt: skip
def test_anything_but_tensors_is_refused(torch_names, tmp_path, content):
  with pytest.raises(ValueError, match=r"model.pth"):
    load_tensors(_zip(tmp_path / "model.pth", content, {}))


def _reach(**changes):
  array = _array(np.arange(6))
  return {"weight": _Tensor("1", array, **{"shape": (6,), "strides": (1,), **changes})}, array


@pytest.mark.parametrize("changes", [
  {"shape": (7,)}, {"offset": 1}, {"strides": (2,)}, {"offset": -1}, {"strides": (-1,)},
  {"shape": (10**9,), "strides": (0,)}, {"shape": (2, 3), "strides": (1,)},
], ids=str)  # fmt: skip
def test_a_tensor_outside_its_storage_is_refused(torch_names, tmp_path, changes):
  tensors, array = _reach(**changes)
  with pytest.raises(ValueError, match="tensor"):
    load_tensors(_zip(tmp_path / "model.pth", tensors, {"1": array}))


@pytest.mark.parametrize("write", LAYOUTS)
def test_a_file_cut_anywhere_is_an_error_of_one_line(torch_names, tmp_path, write):
  tensors = _tensors()
  path = write(tmp_path / "model.pth", tensors, {t.key: t.array for t in tensors.values()})
  content = path.read_bytes()
  for end in range(0, len(content) - 1, max(1, len(content) // 40)):
    path.write_bytes(content[:end])
    with pytest.raises(ValueError, match=r"model\.pth") as error:
      load_tensors(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(ValueError, match=r"no weights file .*gone\.pth"):
    load_tensors(tmp_path / "gone.pth")
