"""Forged releases: one row a forgery. The forger rewrites digest, texts, card and manifest too.

Add a row to FORGERIES for whatever `verify` should find. What it cannot find stands in
`verify.TAKEN_ON_TRUST`, and is printed under "verified".
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import bound, fit_texts, parameters, write_release

from dp_jax import cli
from dp_jax.privacy import FullBatch, Mechanism, PrivacySpec, shares
from dp_jax.privacy.ledger import Ledger
from dp_jax.statement import manifest, model_card, privacy_json, schema
from dp_jax.statement.verify import TAKEN_ON_TRUST, verify_release

Record = dict[str, Any]


def forge(folder: Path, record: Record, card: str | None = None) -> None:
  """Writes a record with everything that is derived from it brought in line."""
  fit_texts(record)
  record["digest"] = privacy_json.record_digest(record)
  text = model_card.model_card(record) if card is None else card
  (folder / "model_card.md").write_text(text, encoding="utf-8")
  (folder / "privacy.json").write_text(json.dumps(record), encoding="utf-8")
  manifest.write_manifest(folder)


def _with_header(**changes: Any) -> Callable[[Path, Record], None]:
  """Other parameters, to which the record is bound: their header says something else."""

  def change(folder: Path, record: Record) -> None:
    (folder / "params.safetensors").write_bytes(parameters(record, **changes))
    record["parameters"]["sha256"] = manifest.sha256(folder / "params.safetensors")
    forge(folder, record)

  return change


def _with_public(name: str, value: Any) -> Callable[[Path, Record], None]:
  def change(folder: Path, record: Record) -> None:
    record["treated_as_public"][name] = value
    forge(folder, record)

  return change


def _with(value: Any, *path: str) -> Callable[[Path, Record], None]:
  def change(folder: Path, record: Record) -> None:
    inner = record
    for key in path[:-1]:
      inner = inner[key]
    inner[path[-1]] = value
    forge(folder, record)

  return change


def _card(change: Callable[[str], str]) -> Callable[[Path, Record], None]:
  def forged(folder: Path, record: Record) -> None:
    forge(folder, record, change(model_card.model_card(record)))

  return forged


def _other_parameters(folder: Path, record: Record) -> None:
  content = (folder / "params.safetensors").read_bytes()
  (folder / "params.safetensors").write_bytes(content[:-4] + b"\x00\x00\x80?")
  forge(folder, record)


def _no_header(folder: Path, record: Record) -> None:
  from safetensors.numpy import load, save

  arrays = load((folder / "params.safetensors").read_bytes())
  (folder / "params.safetensors").write_bytes(save(arrays))
  record["parameters"]["sha256"] = manifest.sha256(folder / "params.safetensors")
  forge(folder, record)


_MODEL = {"name": "linear", "sizes": {}, "input_shape": [8, 8, 1], "num_classes": 3,
          "value_range": [0.0, 16.0], "class_names": ["zero", "one", "two"],
          "multilabel": False}  # fmt: skip
_ANCESTOR = {"name": "old.safetensors", "sha256": "cd" * 32, "protected": True,
             "declared": "private", "test_key": False, "traced": True, "epsilon": 3.0,
             "delta": 1e-6, "unit": "scan", "adjacency": "zero_out"}  # fmt: skip
_EXPOSED = {**_ANCESTOR, "protected": False, **dict.fromkeys(
  ("epsilon", "delta", "unit", "adjacency"))}  # fmt: skip

FORGERIES: dict[str, tuple[Callable[[Path, Record], None], str]] = {
  "parameters of a plain run": (_with_header(protected=False, guarantee=None), "no guarantee"),
  "parameters of a test key": (_with_header(test_key=True), "test_key"),
  "parameters without a header": (_no_header, "no guarantee"),
  "parameters of another guarantee": (
    _with_header(guarantee={"epsilon": 9.0, "delta": 1e-5, "unit": "scan",
                            "adjacency": "zero_out"}), "the guarantee in the header"),
  "one other number": (_other_parameters, "parameters.sha256"),
  "parameters of private data": (_with_header(declared="private"), "declared is 'public'"),
  "weights that a private release is behind": (
    _with_header(ancestry=[_ANCESTOR]), "pretrained_weights does not name"),
  "weights that private records are behind": (
    _with_header(ancestry=[_EXPOSED]), "without protection"),
  "a warning on starting weights that is left out": (
    _with_header(ancestry=[{**_ANCESTOR, "sha256": "ab" * 32}]), "warnings leaves out: the start"),
  "a header that is no JSON": (_with_header(model="{"), "cannot be read"),
  "a header of another kind": (_with_header(model=7), "cannot be read"),
  "other classes": (_with_public("class_names", ["a", "b", "c"]), "class_names is not"),
  "fewer classes": (_with_public("num_classes", 2), "num_classes is not"),
  "another shape": (_with_public("input_shape", [16, 16, 1]), "input_shape is not"),
  "another range": (_with_public("value_range", [0.0, 255.0]), "value_range is not"),
  "labels of another kind": (_with_public("multilabel", True), "multilabel is not"),
  "columns in another order": (
    _with_header(model=json.dumps({**_MODEL, "reading": {"input_shape": [1, 8, 8]},
                                   "class_names": ["two", "one", "zero"]})), "class_names is not"),
  "data that are said to be private": (_with("private", "declared"), "'public' in the header"),
  "data that are said to be anything": (_with("secret", "declared"), "must be one of"),
  "a test key that is said to be secret": (
    _with_header(test_key=True), "test_key is False"),
  "another unit": (_with("patient", "unit"), "for each 'scan'"),
  "another generator": (_with("pcg64", "randomness", "generator"), "randomness.generator"),
  "a wider key": (_with(256, "randomness", "key_bits"), "randomness.key_bits"),
  "units drawn by another": (
    _with({"generator": "Philox", "key_bits": 128}, "randomness", "sampling"),
    "randomness.sampling"),
  "an accuracy on private data": (
    _with({"split": "test", "accuracy": 2.0}, "evaluation"), "evaluation"),
  "a card that says less and hides the truth": (
    _card(lambda text: f"# epsilon 0.001\n\n<!--\n{text}\n-->\n"), "model_card.md"),
  "a card with a line more": (_card(lambda text: text + "\nepsilon 0.001\n"), "model_card.md"),
  "a card with a smaller delta": (
    _card(lambda text: text.replace("1e-5", "1e-9")), "model_card.md"),
  "a card without its front": (_card(lambda text: text.split("---\n", 2)[2]), "model_card.md"),
}  # fmt: skip


@pytest.fixture(name="release")
def _release(tmp_path, record):
  write_release(tmp_path / "release", record)
  return tmp_path / "release"


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found(release, record, name):
  change, said = FORGERIES[name]
  change(release, copy.deepcopy(record))
  problems = verify_release(release).problems
  assert any(said in problem for problem in problems), problems


def test_the_honest_release_is_accepted_with_what_is_taken_on_trust(release, record):
  assert verify_release(release).problems == []
  text = str(verify_release(release))
  assert text.startswith("verified") and "taken on trust:" in text
  for what in TAKEN_ON_TRUST.values():
    assert f"- {what}" in text
  forge(release, bound(record, {"split": "test", "accuracy": 0.5}))
  assert verify_release(release).problems == []


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
  if isinstance(value, dict) and value:
    for key, item in value.items():
      yield from _leaves(item, (*path, key))
  elif isinstance(value, list) and value:
    for i, item in enumerate(value):
      yield from _leaves(item, (*path, i))
  else:
    yield path


def _other(value: Any) -> Any:
  """Something else of the same type, close to it."""
  if value is None:
    return "something"
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value + 1
  if isinstance(value, float):
    return value * 1.0001 if value else 1e-3
  return f"{value}x" if isinstance(value, str) else [1]


def test_every_field_is_bound_or_taken_on_trust(release, record):
  """Each leaf of privacy.json alone, with all that is derived from the record written anew."""
  derived = {"statement", "statement_long", "nist_sp_800_226", "digest"}
  accepted = set()
  for path in _leaves(record):
    if path[0] in derived:
      continue
    forged = copy.deepcopy(record)
    inner: Any = forged
    for key in path[:-1]:
      inner = inner[key]
    inner[path[-1]] = _other(inner[path[-1]])
    try:
      forge(release, forged)
    except (
      KeyError,
      TypeError,
      ValueError,
    ):  # no text can be written of it, and the schema refuses it
      assert schema.problems(forged)
      continue
    if not verify_release(release).problems:
      accepted.add(".".join(str(key) for key in path))
  unknown = {
    name for name in accepted
    if not any(name == each or name.startswith(f"{each}.") for each in TAKEN_ON_TRUST if each)
  }  # fmt: skip
  assert unknown == set()
  assert "hyperparameter_selection" in accepted  # a field that nothing can show


def test_a_warning_that_is_made_up_is_said_to_be_taken_on_trust(release, record):
  """It stands in the statement that is printed under "verified"."""
  record["warnings"].append("in fact epsilon is 0.001")
  forge(release, record)
  found = verify_release(release)
  assert not found.problems and "in fact epsilon is 0.001" in str(found)
  assert "- what the warnings say" in str(found)


def test_what_the_sums_of_a_solver_were_is_what_the_ledger_says(tmp_path, facts):
  one, other = (Mechanism(FullBatch(), noise, 1, 1.5) for noise in (8.0, 6.0))
  parts = {"class sums": one, "second moment": other}
  ledger = Ledger()
  ledger.reserve_all(parts, unit="scan")
  spec = PrivacySpec(shares.account((one, other), 1e-5).epsilon, 1e-5, "scan")
  record = bound(privacy_json.privacy_record(facts(
    spec=spec, mechanism=shares.joint((one, other)), parts=parts, num_units=100,
    ledger_entries=ledger.to_list(), expected_batch_size=100.0,
  )))  # fmt: skip
  write_release(tmp_path / "release", record)
  assert not verify_release(tmp_path / "release").problems
  record["parts"][0]["purpose"] = "nothing of the records"
  forge(tmp_path / "release", record)
  assert "no entry is a release" in verify_release(tmp_path / "release").problems[0]


def test_a_record_of_an_earlier_version_is_told_in_one_line(release, record):
  old = copy.deepcopy(record)
  old["schema_version"] = 1
  del old["parameters"]["sha256"], old["evaluation"]
  (release / "privacy.json").write_text(json.dumps(old), encoding="utf-8")
  manifest.write_manifest(release)
  (problem,) = verify_release(release).problems
  assert "earlier version of dp_jax" in problem


def test_a_release_of_a_test_key_does_not_pass_unless_that_is_asked_for(tmp_path, facts, capsys):
  record = privacy_json.privacy_record(facts(test_key=True))
  write_release(tmp_path / "release", record)
  assert cli.main(["verify", str(tmp_path / "release")]) == 1
  assert capsys.readouterr().out.startswith("not private: fixed seed")
  assert cli.main(["verify", str(tmp_path / "release"), "--allow_test_key"]) == 0
