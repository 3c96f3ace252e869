"""The package as it is installed: a wheel in another folder, with the configurations in it."""

import os
import shutil
import subprocess
import sys

import pytest
from support import ROOT

QUICK = (
  "--config.train.steps=2", "--config.data.num_records=120", "--config.checkpoint.every=9",
  "--config.train.engine=vmap", "--config.mesh=data:1",
)  # fmt: skip


@pytest.fixture(scope="module", name="installed")
def _installed(tmp_path_factory):
  """A folder that a wheel was unpacked into, and nothing of the checkout on the path."""
  folder = tmp_path_factory.mktemp("wheel")
  source = folder / "source"  # a build leaves files in the tree
  for part in ("dp_jax", "configs"):
    shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
  for part in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / part, source / part)
  build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
  done = subprocess.run([*build, str(source)], capture_output=True, text=True)
  if done.returncode and "No matching distribution" in done.stderr:
    pytest.skip("a wheel is built with setuptools of the package index, which is not reached")
  assert done.returncode == 0, done.stderr
  (wheel,) = folder.glob("*.whl")
  target = folder / "site"
  install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
  subprocess.run([*install, str(target), str(wheel)], check=True)
  return target


def _run(installed, cwd, *arguments):
  code = (
    "import sys; sys.path = [p for p in sys.path if p]; import dp_jax\n"
    f"assert dp_jax.__file__.startswith({str(installed)!r}), dp_jax.__file__\n"
    "from dp_jax.cli import run; run()"
  )
  env = {**os.environ, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
  return subprocess.run(
    [sys.executable, "-c", code, *arguments], cwd=cwd, env=env, capture_output=True, text=True
  )


def test_a_configuration_of_the_wheel_is_found_from_another_folder(installed, tmp_path):
  done = _run(installed, tmp_path, "train", "--config=configs/digits.py", "--workdir=run", *QUICK)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "run" / "release" / "privacy.json").is_file()
  assert (tmp_path / "run" / "report.html").is_file()  # with its style sheet
  done = _run(installed, tmp_path, "verify", "run/release")
  assert done.returncode == 0, done.stdout


def test_a_configuration_imports_its_neighbour(installed, tmp_path):
  folder = tmp_path / "mine"
  folder.mkdir()
  (folder / "shared_settings.py").write_text("STEPS = 0\n")
  (folder / "mine.py").write_text(
    "from shared_settings import STEPS\nfrom dp_jax.config.files import base_config\n"
    "def get_config():\n  config = base_config()\n  config.data.source = 'digits'\n"
    "  config.train.steps = STEPS\n  return config\n"
  )
  done = _run(installed, tmp_path, "train", "--config=mine/mine.py", "--workdir=run")
  assert done.returncode == 2 and "train.steps=0 must be at least 1" in done.stderr
