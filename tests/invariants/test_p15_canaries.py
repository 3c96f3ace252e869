"""P15: what is planted in private records, and what training measures of them, stays inside.

A canary string and a canary number are planted in group columns and inputs; a private and a plain
run train on them and are compared. Neither they, nor any loss, norm or metric that the runs wrote
under `private/`, stands anywhere outside `private/` and `checkpoints/`.
"""

import json
import re
import zipfile

import numpy as np
import pytest
from support import small_config, write_npz

from dp_jax import cli
from dp_jax.training.run import train

STRING, NUMBER = "canary-Zqx7", 0.73164237
RECORDS = 160


def _config(folder, declared, **privacy):
  rng = np.random.default_rng(0)
  images = rng.random((RECORDS, 4, 4, 1), np.float32)
  images[:, 0, 0, 0] = NUMBER
  data = write_npz(
    folder / "data", images, rng.integers(0, 2, RECORDS), ward=np.array([STRING, "b"] * 80),
    age=np.full(RECORDS, NUMBER), person=np.array([f"{STRING}-{i % 80}" for i in range(RECORDS)]),
  )  # fmt: skip
  return small_config(
    data={
      "source": "npz", "path": str(data), "declared": declared, "num_classes": 2,
      "groups": ["ward", "age"],
    },
    model={"name": "linear"}, train__steps=4, eval={"every": 2},
    privacy={"epsilon": 4.0, "delta": 1e-3, "sampling": "full_batch", "unit": "person", **privacy},
  )  # fmt: skip


def _runs(folder, capfd, declared):
  """A private run and a plain one, compared; the folder, and what was printed but for the path."""
  train(_config(folder, declared), folder / "private_run", progress=False)
  plain = _config(folder, declared, enabled=False)
  train(plain, folder / "plain_run", progress=False)
  runs = [str(folder / "private_run"), str(folder / "plain_run")]
  assert cli.main(["compare", *runs, "--groups=ward,age,class"]) == 0
  assert cli.main(["compare", *runs, "--groups=ward", "--json"]) == 0
  (folder / "printed").write_text("".join(capfd.readouterr()).replace(str(folder), ""))
  return folder


def _texts(folder, *, inside):
  """(path, content) of every file inside, or outside, of private/ and checkpoints/; unpacked."""
  for path in sorted(folder.rglob("*")):
    parts = path.relative_to(folder).parts
    hidden = "private" in parts or "checkpoints" in parts
    if not path.is_file() or parts[0] == "data" or hidden != inside:
      continue
    yield str(path.relative_to(folder)), path.read_bytes()
    if zipfile.is_zipfile(path):
      with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
          yield f"{path.relative_to(folder)}/{name}", archive.read(name)


def _found(folder, canaries, *, inside):
  return sorted(
    name for name, content in _texts(folder, inside=inside) if any(c in content for c in canaries)
  )


def _canaries():
  texts = [STRING, str(NUMBER), f"{NUMBER:.4f}"]
  binary = [np.array(NUMBER, dtype).tobytes() for dtype in (np.float32, np.float64)]
  return [*(t.encode() for t in texts), *(t.encode("utf-32-le") for t in texts), *binary]


def _measured(folder):
  """Losses, norms and metrics under private/, as they are written: six decimals and more."""
  found = set()
  for name, content in _texts(folder, inside=True):
    if name.endswith((".jsonl", "comparison.json")):
      found |= set(re.findall(r"\d+\.\d{6,}", content.decode()))
  return [number.encode() for number in found]


@pytest.fixture(scope="module")
def private_data(tmp_path_factory):
  return tmp_path_factory.mktemp("canaries")


def test_canaries_and_losses_are_nowhere_outside(private_data, capfd):
  folder = _runs(private_data, capfd, "private")
  assert (folder / "printed").read_text().count("private/comparison.html") == 2
  assert _found(folder, _canaries(), inside=False) == []
  inside = _found(folder, _canaries(), inside=True)
  for name in ("predictions.npz/group:ward.npy", "comparison.html"):
    assert f"private_run/private/{name}" in inside  # the search does find them
  measured = _measured(folder)
  assert len(measured) > 50
  assert _found(folder, measured, inside=False) == []


def test_the_same_runs_on_public_data_are_caught(tmp_path, capfd):
  """The broken variant is what public data may show."""
  folder = _runs(tmp_path, capfd, "public")
  found = _found(folder, _canaries(), inside=False)
  for name in (
    "printed",
    "private_run/comparison.html",
    "private_run/predictions.npz/group:ward.npy",
  ):
    assert name in found
  # What one run measures of itself is in the comparison too, number for number.
  last = json.loads((folder / "private_run" / "metrics.jsonl").read_text().splitlines()[-1])
  accuracy = json.dumps(last["metrics"]["accuracy"])
  assert re.search(
    rf"\b{re.escape(accuracy)}\b", (folder / "private_run/comparison.json").read_text()
  )
