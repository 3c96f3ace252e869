"""Imports point downwards only, without cycles; lower layers stay free of what they do not need."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folders that stand on one line may import each other, as long as no cycle of modules comes of it.
LAYERS = (
  ("errors", "files"),
  ("privacy",),
  ("gradients",),
  ("models", "data"),
  ("evaluation", "statement"),
  ("tasks", "solvers"),
  ("report",),
  ("config", "parallel"),
  ("training",),
  ("runs",),
  ("commands",),
  ("cli",),
  ("__main__", "__init__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FORBIDDEN = {
  "errors": ("jax",),
  "files": ("jax", "flax", "optax", "orbax"),
  "privacy": ("jax", "flax", "optax", "orbax"),
  "statement": ("jax", "flax", "optax", "orbax"),
  "report": ("jax", "flax", "optax", "orbax"),
  "gradients": ("flax", "orbax", "ml_collections"),
}


def _modules() -> dict[str, Path]:
  paths = (ROOT / "dp_jax").rglob("*.py")
  return {_name(path.relative_to(ROOT)): path for path in paths}


def _name(path: Path) -> str:
  return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.AST) -> set[str]:
  """Everything that a module imports, under `if TYPE_CHECKING` and in functions too."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, "relative import"
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def _own(imports: set[str], modules: dict[str, Path]) -> set[str]:
  """The modules of the package among the imports: of `a.b.C`, the module `a.b`."""
  return {n if n in modules else n.rsplit(".", 1)[0] for n in imports if n.startswith("dp_jax")}


def _folder(module: str) -> str:
  return module.split(".")[1] if "." in module else "__init__"


def _faults(module: str, imports: set[str], modules: dict[str, Path]) -> list[str]:
  folder = _folder(module)
  level = LEVEL[folder]
  up = [n for n in _own(imports, modules) if LEVEL[_folder(n)] > level]
  roots = {name.split(".")[0] for name in imports}
  wrong = roots & {*FORBIDDEN.get(folder, ()), "experiments", "configs", "tests"}
  return [f"{module} imports {name}" for name in sorted({*up, *wrong})]


@pytest.fixture(scope="module", name="graph")
def _graph() -> tuple[dict[str, Path], dict[str, set[str]]]:
  modules = _modules()
  return modules, {n: _imports(ast.parse(p.read_text())) for n, p in modules.items()}


def test_imports_point_downwards(graph):
  modules, imports = graph
  assert not [f for name in modules for f in _faults(name, imports[name], modules)]
  # ... and the check sees an import of a layer above, and one of a library of such a layer.
  seen = _faults("dp_jax.gradients.clipping", {"dp_jax.training.loop.run", "flax"}, modules)
  assert seen == [
    "dp_jax.gradients.clipping imports dp_jax.training.loop",
    "dp_jax.gradients.clipping imports flax",
  ]


def test_no_cycles(graph):
  modules, imports = graph
  edges = {name: _own(imports[name], modules) - {name} for name in modules}
  TopologicalSorter(edges).prepare()
  # ... and the check sees a cycle.
  with pytest.raises(CycleError):
    TopologicalSorter({**edges, "dp_jax.privacy.spec": {"dp_jax.privacy.ledger"}}).prepare()


def test_no_folder_is_crowded():
  folders = {path.parent for path in _modules().values()}
  crowded = {str(f.relative_to(ROOT)): len(list(f.glob("*.py"))) for f in folders}
  assert not {f: n for f, n in crowded.items() if n > 20}
