"""The manifest lists every file of a release, and a release holds plain files only."""

import json
import os

import pytest

from dp_jax.files import atomic
from dp_jax.statement import manifest


@pytest.fixture(name="release")
def _release(tmp_path):
  folder = tmp_path / "release"
  folder.mkdir()
  for name in ("params.safetensors", "privacy.json", "model_card.md"):
    (folder / name).write_text(name, encoding="utf-8")
  manifest.write_manifest(folder)
  return folder


def test_written_manifest_is_accepted(release):
  assert sorted(manifest.read_manifest(release)) == [
    "model_card.md",
    "params.safetensors",
    "privacy.json",
  ]
  assert manifest.manifest_problems(release) == []


def test_changed_missing_and_extra_files(release):
  (release / "privacy.json").write_text("other", encoding="utf-8")
  (release / "model_card.md").unlink()
  (release / "notes.txt").write_text("", encoding="utf-8")
  problems = manifest.manifest_problems(release)
  assert len(problems) == 3
  for name in ("privacy.json", "model_card.md", "notes.txt"):
    assert sum(name in problem for problem in problems) == 1


def test_links_folders_and_hidden_files_are_rejected(release, tmp_path):
  outside = tmp_path / "outside"
  outside.write_text("params.safetensors", encoding="utf-8")
  (release / "params.safetensors").unlink()
  (release / "params.safetensors").symlink_to(outside)
  assert "not a plain file" in manifest.manifest_problems(release)[0]
  with pytest.raises(ValueError, match="plain files"):
    manifest.write_manifest(release)
  (release / "params.safetensors").unlink()
  for make in (lambda p: p.mkdir(), lambda p: os.mkfifo(p)):
    make(release / "odd")
    assert "not a plain file" in manifest.manifest_problems(release)[0]
    (release / "odd").rmdir() if (release / "odd").is_dir() else (release / "odd").unlink()
  (release / ".hidden").write_text("", encoding="utf-8")
  assert "plain file name" in manifest.manifest_problems(release)[0]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/b", "manifest.json", ""])
def test_manifest_may_not_name_anything_outside(release, name):
  path = release / manifest.NAME
  content = json.loads(path.read_text(encoding="utf-8"))
  path.write_text(json.dumps(content | {name: "0" * 64}), encoding="utf-8")
  with pytest.raises(ValueError, match="not the name of a file"):
    manifest.read_manifest(release)
  assert manifest.manifest_problems(release)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}', "[1]", "{"])
def test_json_is_read_strictly(tmp_path, text):
  path = tmp_path / "x.json"
  path.write_text(text, encoding="utf-8")
  with pytest.raises(ValueError, match=r"x\.json"):
    manifest.read_json(path)


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path):
  path = tmp_path / "x"
  atomic.write_text(path, "old")
  with pytest.raises(UnicodeEncodeError):
    atomic.write_text(path, "\ud800")
  assert path.read_text(encoding="utf-8") == "old"
  assert list(tmp_path.iterdir()) == [path]
