"""Documents name files that are there, and the first page of a maintainer is short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
  path
  for pattern in ("*.md", "dp_jax/**/README.md", "experiments/**/README.md")
  for path in ROOT.glob(pattern)
)
# A file or folder of code: what a run writes and a user's own folders are none of these.
CODE = re.compile(r"[\w./*-]+(\.py|\.sh|\.css|\.schema\.json|/)")
OF_RUNS = ("private/", "release/", "unprotected/", "checkpoints/best")
MAX_LINES = 200


def _missing(text: str, folder: Path) -> list[str]:
  """Paths in backticks, and targets of links, of which there is none in the repository.

  A path starts at the root, in the package, in the tests, or where the document lies.
  """
  text = re.sub(r"(?ms)^```.*?^```", "", text)  # commands and programs
  words = {word for span in re.findall(r"`([^`]+)`", text) for word in span.split()}
  paths = {each for each in words if CODE.fullmatch(each) and not each.startswith(OF_RUNS)}
  starts = (ROOT, ROOT / "dp_jax", ROOT / "tests", folder)
  found = {
    path
    for path in paths
    for start in starts
    if path[0] != "/" and any(start.glob(path.strip("/")))
  }
  links = {
    link.partition("#")[0]
    for link in re.findall(r"\]\(([^)\s]+)\)", text)
    if "://" not in link and not link.startswith("#")
  }
  return sorted((paths - found) | {link for link in links if not (folder / link).exists()})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_and_link_is_there(document):
  assert not _missing(document.read_text(), document.parent)


def test_what_is_not_there_is_seen():
  text = (
    "`training/loop.py`, `invariants/test_p01_*`, `training/loops.py`, [a](README.md), [b](C.md)"
  )
  assert _missing(text, ROOT) == ["C.md", "training/loops.py"]


def test_the_page_of_a_maintainer_is_short():
  assert len((ROOT / "BUILD.md").read_text().splitlines()) <= MAX_LINES


def test_every_package_that_is_explained_is_linked():
  """From the first page, so that nothing is told where nobody looks."""
  page = (ROOT / "BUILD.md").read_text()
  packages = [str(path.relative_to(ROOT)) for path in ROOT.glob("dp_jax/**/README.md")]
  assert not [path for path in packages if f"({path})" not in page]
