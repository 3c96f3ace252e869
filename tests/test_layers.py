"""Imports point downwards only, and the lower layers stay free of what they do not need."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dp_jax"
LAYERS = {
  "privacy": 0, "gradients": 1, "models": 2, "data": 2, "tasks": 2, "solvers": 2,
  "evaluation": 3, "report": 3, "training": 4,
  "config_file": 5, "commands": 6, "cli": 7, "__main__": 8, "__init__": 8,
}  # fmt: skip
FORBIDDEN = {
  "privacy": ("jax", "flax", "optax", "orbax"),
  "gradients": ("flax", "orbax", "ml_collections"),
}


def _imports(path: Path) -> set[str]:
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      found.add(node.module)
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def _layer(path: Path) -> str:
  part = path.relative_to(PACKAGE).parts[0]
  return part.removesuffix(".py")


def _upward(path: Path, imports: set[str]) -> list[str]:
  layer = LAYERS[_layer(path)]
  targets = {name.split(".")[1] for name in imports if name.startswith("dp_jax.")}
  return sorted(t for t in targets if LAYERS.get(t, 0) > layer)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_downwards(path):
  imports = _imports(path)
  assert not _upward(path, imports)
  roots = {name.split(".")[0] for name in imports}
  assert not roots & set(FORBIDDEN.get(_layer(path), ())), "a dependency of a higher layer"
  assert not roots & {"experiments", "configs", "tests"}


def test_an_upward_import_is_caught():
  path = PACKAGE / "gradients" / "clipping.py"
  assert _upward(path, {"dp_jax.training.loop", "dp_jax.privacy.keys"}) == ["training"]


def test_every_folder_has_a_layer():
  folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
  assert folders <= set(LAYERS)
