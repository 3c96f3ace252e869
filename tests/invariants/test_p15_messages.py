"""P15: no message of an error, and no line of a log, holds a part of a private record.

A canary stands where an error would quote it: in a first line that is a record since the file has
no names, in the name of a folder or an array, in a file that is no table or no array, in an id, a
path, a label. On data declared public the same errors do quote it, so that the search can find it.
And nothing that one record holds or names stops a run: a pipe, a folder, a name that no file can
have, an image of which the decoder runs out of memory.
"""

import dataclasses
import errno
import io
import json
import os
import socket
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image
from support import one_label, small_config, write_npz

from dp_jax import cli
from dp_jax.data import RecordError, UnitLoader, open_source
from dp_jax.data.sources import images
from dp_jax.data.sources.csv_source import Csv
from dp_jax.data.sources.images import ImageDecoder
from dp_jax.training.run import train
from dp_jax.training.setup.prepare import prepare

CANARY = "canary-Zqx7"
CSV = {"source": "csv", "features": ["age"], "feature_ranges": [[0.0, 100.0]],
       "label_columns": ["ill"], "class_names": ["no", "yes"]}  # fmt: skip


def _table(folder, first, *rows):
  for split in ("train", "test"):
    (folder / f"{split}.csv").write_text("\n".join([first, *rows]) + "\n")
  return {**CSV, "path": str(folder)}


def _names(folder):
  return _table(folder, "person,age,ill", "p1,50,no")


def _no_names(folder):
  return _table(folder, f"{CANARY},50,no", "p1,40,yes")


def _no_names_twice(folder):
  return _table(folder, f"{CANARY},{CANARY},no", "p1,40,yes")


def _no_group(folder):
  return {**_table(folder, f"{CANARY},age,ill", "p1,50,no"), "groups": ["ward"]}


def _folder_of_no_class(folder):
  for split in ("train", "test"):
    (folder / split / CANARY).mkdir(parents=True)
  return {"source": "folder", "path": str(folder), "class_names": ["a"], "input_shape": [4, 4, 1]}


def _other_arrays(folder):
  write_npz(folder, np.zeros((2, 2)), np.zeros(2))
  for split in ("train", "test"):
    np.savez(folder / f"{split}.npz", **{CANARY: np.zeros(2)})
  return {"source": "npz", "path": str(folder), "num_classes": 2}


def _no_array(folder):
  for split in ("train", "test"):
    np.save(folder / f"{split}_labels_00000.npy", np.zeros(2, np.int64))
    header = f"{{'{CANARY}': 1{'' if split == 'test' else '}'}".encode()
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header))
    (folder / f"{split}_inputs_00000.npy").write_bytes(start + header)
  return {"source": "npy", "path": str(folder), "num_classes": 2}


def _bad_label(folder):
  write_npz(folder, np.zeros((2, 4, 4, 1), np.float32), np.array([0, 731642]))
  return {"source": "npz", "path": str(folder), "num_classes": 2, "strict": True}


KINDS = {each.__name__: each for each in (
  _no_names, _no_names_twice, _no_group, _folder_of_no_class, _other_arrays, _no_array, _bad_label,
)}  # fmt: skip


def _said(data, declared):
  config = small_config(data={**data, "declared": declared}, model={"name": "linear"})
  with pytest.raises(ValueError) as error:
    prepare(config)
  return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_quotes_no_record_of_private_data(tmp_path, kind):
  data = KINDS[kind](tmp_path)
  said = {declared: _said(data, declared) for declared in ("private", "public")}
  for part in (CANARY, "731642"):
    assert part not in said["private"]
  # The broken variant is what public data may show.
  assert CANARY in said["public"] or "731642" in said["public"]


def test_a_header_of_half_a_file_is_an_error_of_its_own_kind(tmp_path):
  """NumPy raises an error of Python's own parser for it."""
  data = _no_array(tmp_path)
  with pytest.raises(ValueError, match=r"cannot read .*test_inputs_00000.npy: TokenError"):
    open_source("npy", "test", path=data["path"])


def test_nor_does_the_command_line_or_a_traceback(tmp_path, capfd, monkeypatch):
  monkeypatch.setenv("DP_JAX_TRACEBACK", "1")
  data = _no_names(tmp_path)
  config = small_config(data={**data, "declared": "private"}, model={"name": "linear"})
  (tmp_path / "config.py").write_text(
    "import json\nfrom dp_jax.config.files import base_config\n"
    "def get_config():\n  config = base_config()\n"
    f"  config.update(json.loads({json.dumps(json.dumps(_set(config.to_dict())))}))\n"
    "  return config\n"
  )
  flags = [f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / 'run'}"]
  assert cli.main(["train", *flags]) == 2
  printed = "".join(capfd.readouterr())
  assert "has no column" in printed and CANARY not in printed
  assert not (tmp_path / "run").exists()


def _set(values):
  """A configuration without what is not set."""
  return {
    name: _set(value) if isinstance(value, dict) else value
    for name, value in values.items()
    if value is not None
  }


def _odd_files(folder):
  """Paths of which none is an image, one a record, and what may stand in their place."""
  folder.mkdir()
  Image.fromarray(np.full((6, 6), 9, np.uint8)).save(folder / "good.png")
  os.mkfifo(folder / "pipe.png")
  (folder / "folder.png").mkdir()
  server = socket.socket(socket.AF_UNIX)
  with_short_name = os.open(folder, os.O_RDONLY)
  server.bind(f"/proc/self/fd/{with_short_name}/socket.png")
  os.close(with_short_name)
  server.close()
  (folder / "loop.png").symlink_to("loop.png")
  (folder / "device.png").symlink_to("/dev/zero")
  (folder / "text.png").write_text(CANARY)
  return ["good.png", "pipe.png", "folder.png", "socket.png", "loop.png", "device.png", "text.png",
          f"{CANARY}\0.png", "x" * 300 + ".png", "../outside.png", "/etc/hostname", "a" * 5000,
          "gone.png", "/proc/self/mem", "\N{GRINNING FACE}.png"]  # fmt: skip


def test_nothing_that_a_path_names_stops_a_run(tmp_path):
  paths = _odd_files(tmp_path / "data")
  Image.fromarray(np.zeros((6, 6), np.uint8)).save(tmp_path / "outside.png")
  text = "file,ill\n" + "".join(f"{path},no\n" for path in paths)
  (tmp_path / "data" / "train.csv").write_text(text)
  root = str(tmp_path / "data")
  spec = Csv(
    label_columns=("ill",), class_names=("no", "yes"), image_column="file", image_root=root
  )
  source = open_source("csv", "train", spec, path=str(tmp_path / "data"), input_shape=(4, 4, 1))
  assert len(source.fingerprint()) == 64
  loader = UnitLoader(source, one_label((4, 4, 1), 2, (0.0, 255.0)))
  units, _ = loader.load(np.arange(len(paths)), len(paths))
  assert units["record_mask"][:, 0].tolist() == [True] + [False] * (len(paths) - 1)
  anywhere = dataclasses.replace(spec, image_root=None)
  source = open_source("csv", "train", anywhere, path=root, input_shape=(4, 4, 1))
  units, _ = UnitLoader(source, loader.spec).load(np.arange(len(paths)), len(paths))
  used = [paths[i] for i in np.flatnonzero(units["record_mask"][:, 0])]
  assert used == ["good.png", "../outside.png"]
  said = " ".join(loader.bad_records.values())
  assert CANARY not in said and "xxx" not in said and "png" not in said


@pytest.mark.parametrize("error", [
  SyntaxError(CANARY), struct.error(CANARY), zlib.error(CANARY), RecursionError(CANARY),
  KeyError(CANARY), OSError(errno.EIO, CANARY, CANARY), UnicodeError(CANARY), TypeError(CANARY),
  AssertionError(CANARY), EOFError(CANARY), OverflowError(CANARY), IndexError(CANARY),
])  # fmt: skip
def test_whatever_the_decoder_raises_is_the_fault_of_one_record(monkeypatch, error):
  def fails(*arguments, **options):
    raise error

  monkeypatch.setattr(images.Image, "open", fails)
  with pytest.raises(RecordError) as caught:
    ImageDecoder((4, 4, 1)).decode(b"")
  assert CANARY not in str(caught.value) and caught.value.__cause__ is None


def test_errors_of_the_machine_name_no_file(monkeypatch):
  def fails(*arguments, **options):
    raise OSError(errno.EIO, "the drive is gone", CANARY)

  monkeypatch.setattr("builtins.open", fails)
  with pytest.raises(OSError, match="the drive is gone") as caught:
    ImageDecoder((4, 4, 1)).read("a.png")
  assert CANARY not in str(caught.value) and not isinstance(caught.value, ValueError)
  monkeypatch.undo()

  def no_memory(*arguments, **options):
    raise MemoryError(f"Unable to allocate {CANARY}")

  monkeypatch.setattr(images.Image, "open", no_memory)
  with pytest.raises(MemoryError) as told:
    ImageDecoder((4, 4, 1)).decode(b"")
  assert CANARY not in str(told.value)


def test_an_image_or_file_beyond_all_measure_is_malformed(tmp_path, monkeypatch):
  def chunk(kind, content):
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

  header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
  bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9)))
  monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # somebody else in this process may say so
  with pytest.raises(RecordError, match="more than 134,217,728 pixels"):
    ImageDecoder((4, 4, 1)).decode(bomb)
  with open(tmp_path / "huge.png", "wb") as file:
    file.truncate(2**40)
  with pytest.raises(RecordError, match="more than 256 MiB"):
    ImageDecoder((4, 4, 1)).read(tmp_path / "huge.png")


def test_the_decoder_warns_and_logs_nothing(caplog):
  decoder = ImageDecoder((4, 4, 1))
  image = Image.fromarray(np.zeros((6, 6), np.uint8)).convert("P")
  image.info["transparency"] = bytes([0] * 200)
  out = io.BytesIO()
  image.save(out, "PNG")
  with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    decoder = ImageDecoder((4, 4, 1))
    warnings.warn_explicit(CANARY, UserWarning, "f", 1, module="PIL.Image")
    warnings.warn_explicit(CANARY, UserWarning, "f", 1, module="dp_jax.data.sources.images")
    decoder.decode(out.getvalue())
  assert not seen and not caplog.records


def test_a_private_run_over_such_records_says_nothing_of_them(tmp_path, capfd):
  """From the configuration to what is left: what they were stands under private/ alone."""
  paths = _odd_files(tmp_path / "data")[:8]
  rows = [f"{path},{'no' if i % 2 else 'yes'}" for i, path in enumerate([*paths, "good.png"] * 2)]
  text = "\n".join(["file,ill", *rows, f"good.png,{CANARY}"])
  for split in ("train", "test"):
    (tmp_path / "data" / f"{split}.csv").write_text(text)
  data = {"source": "csv", "path": str(tmp_path / "data"), "image_column": "file",
          "input_shape": [4, 4, 1], "label_columns": ["ill"], "class_names": ["no", "yes"],
          "declared": "private"}  # fmt: skip
  config = small_config(data=data, model={"name": "linear"}, train__steps=2)
  train(config, tmp_path / "run", progress=False)
  assert capfd.readouterr() == ("", "")
  notes = json.loads((tmp_path / "run" / "private" / "bad_records.json").read_text())
  assert len(notes["eval"]) == 15
  for path in (tmp_path / "run").rglob("*"):
    if path.is_file() and "checkpoints" not in path.parts:
      assert CANARY.encode() not in path.read_bytes()
