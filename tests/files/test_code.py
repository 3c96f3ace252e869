"""Code of other people: found by name, checked before it is called, and recorded."""

import hashlib
import sys

import pytest

from dp_jax.errors import UserError
from dp_jax.files.code import check_arguments, described, load_callable

TEXT = "def make(*, width=3, **rest):\n  return width\n\nNUMBER = 3\n"


@pytest.fixture(name="module")
def _module(tmp_path, monkeypatch):
  (tmp_path / "others_code.py").write_text(TEXT)
  (tmp_path / "broken_code.py").write_text("raise RuntimeError('PATIENT 7')\n")
  (tmp_path / "needs_code.py").write_text("import no_such_package\n")
  (tmp_path / "typo_code.py").write_text("def f(:\n")
  # As under the command `dp-jax`: the current directory is not where Python looks.
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
  monkeypatch.chdir(tmp_path)
  yield tmp_path / "others_code.py"
  sys.modules.pop("others_code", None)


def test_loaded_from_the_current_directory_and_recorded(module):
  assert load_callable("others_code:make")(width=5) == 5
  said = described("others_code:make", {"widths": (1, 2)})
  digest = hashlib.sha256(module.read_bytes()).hexdigest()
  assert said == {"name": "others_code:make", "kwargs": {"widths": [1, 2]}, "sha256": digest}
  module.write_text(TEXT + "\n")
  assert described("others_code:make", {})["sha256"] != digest
  with pytest.raises(UserError, match="must be JSON values"):
    described("others_code:make", {"width": object()})
  with pytest.raises(UserError, match="is in no file"):
    described("sys:exit", {})


@pytest.mark.parametrize(("name", "told"), [
  ("others_code.make", "not of the form package.module:function"),
  ("others_code:", "not of the form"),
  ("others code:make", "not of the form"),
  ("others_code:missing", "has none of that name"),
  ("others_code:NUMBER", "holds a int there"),
  ("no_such_module:make", "No module named 'no_such_module'"),
  ("needs_code:make", "No module named 'no_such_package'"),
  ("typo_code:f", "SyntaxError"),
  ("broken_code:f", "RuntimeError"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_message(module, name, told):
  with pytest.raises(UserError, match=told) as caught:
    load_callable(name)
  assert "PATIENT" not in str(caught.value)


def test_arguments_are_checked_against_the_signature():
  def make(split, *, width=3):
    raise AssertionError("not called")

  check_arguments("m:make", make, {"split": "train"})
  with pytest.raises(UserError, match=r"m:make\(split, \*, width=3\).*'depth'"):
    check_arguments("m:make", make, {"split": "train", "depth": 2})
  with pytest.raises(UserError, match="missing a required argument: 'split'"):
    check_arguments("m:make", make, {"width": 2})
