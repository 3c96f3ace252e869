"""`verify` accepts what a run wrote, and nothing in which a number was changed."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from made_up_runs import ROW_RUNS, bound, fit_texts, row_record, write_release

from dp_jax import privacy
from dp_jax.privacy.ledger import Ledger, entry_hash
from dp_jax.statement import manifest, model_card, privacy_json, sentences
from dp_jax.statement.verify import verify_release

# Numbers that nothing hangs on. There are none: the texts repeat every number that the accountants
# and the mechanism do not determine. A number that is added to the record without a relation to
# another fails the test below until it has one, or stands here with the reason.
INFORMATIVE: dict[str, str] = {}


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
  """The path of every number in a JSON value."""
  if isinstance(value, dict):
    for key, item in value.items():
      yield from numbers(item, (*path, key))
  elif isinstance(value, list):
    for i, item in enumerate(value):
      yield from numbers(item, (*path, i))
  elif isinstance(value, (int, float)) and not isinstance(value, bool):
    yield path


def changed(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
  """A copy with one value replaced, and nothing else."""
  result = copy.deepcopy(record)
  inner: Any = result
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = value
  return result


def at(record: Any, path: tuple[Any, ...]) -> Any:
  for key in path:
    record = record[key]
  return record


def variants(value: float) -> list[float]:
  """A number a little and a lot off, both ways."""
  if isinstance(value, int):
    return [value + 1, max(0, value - 1) if value else 2, 2 * value + 3]
  if value == 0:
    return [1e-3, 1.0]
  return [value * 1.0001, value * 0.99, value * 2 + 1e-3]


def forge(folder, record: dict[str, Any]) -> None:
  """Writes a record with digest, model card and manifest brought in line, as a forger would."""
  record["digest"] = privacy_json.record_digest(record)
  (folder / "model_card.md").write_text(model_card.model_card(record), encoding="utf-8")
  (folder / "privacy.json").write_text(json.dumps(record), encoding="utf-8")
  manifest.write_manifest(folder)


@pytest.fixture(name="release")
def _release(tmp_path, record):
  folder = tmp_path / "release"
  write_release(folder, record)
  return folder


def test_a_release_is_accepted(release, record):
  outcome = verify_release(release)
  assert outcome.problems == []
  assert outcome.record == record
  assert sentences.statement(record) in str(outcome)
  assert "verified" in str(outcome)


def test_the_order_of_keys_does_not_count(release, record):
  forged = json.loads(json.dumps(record, sort_keys=True))
  (release / "privacy.json").write_text(json.dumps(forged, indent=1), encoding="utf-8")
  manifest.write_manifest(release)
  assert verify_release(release).problems == []


@pytest.mark.parametrize("name", ROW_RUNS)
def test_every_row_is_accepted(tmp_path, name):
  write_release(tmp_path / "release", row_record(name))
  assert verify_release(tmp_path / "release").problems == []


def test_every_number_counts(release, record):
  """Each number of privacy.json, changed alone, with digest and manifest brought in line."""
  paths = list(numbers(record))
  assert len(paths) > 40
  accepted = []
  for path in paths:
    for value in variants(at(record, path)):
      forge(release, changed(record, path, value))
      if not verify_release(release).problems:
        accepted.append((".".join(map(str, path)), value))
  assert {name for name, _ in accepted} == set(INFORMATIVE), accepted


def test_every_evaluation_point_counts(release, record):
  """Each text of the NIST mapping, changed alone; and with all other texts brought in line."""
  for name, text in record["nist_sp_800_226"].items():
    for forged_text in (text.replace(".", "!"), "This point holds without limits."):
      forge(release, changed(record, ("nist_sp_800_226", name), forged_text))
      assert verify_release(release).problems == [
        "nist_sp_800_226 is not what the other fields say"
      ]


def test_numbers_of_a_subsampled_run_count(tmp_path):
  """The numbers that a Poisson run has and a full batch does not, and those of its accountants."""
  record = row_record("poisson")
  release = tmp_path / "release"
  write_release(release, record)
  for path in [
    ("sampling_rate",),
    ("mechanism", "sampling", "rate"),
    ("expected_batch_size",),
    ("treated_as_public", "num_units"),
    ("releases", 0, "mechanism", "sampling", "rate"),
    ("epsilon",),
    ("cross_check", "optimistic_pld_epsilon"),
    ("attacker", "trade_off", 0, "true_positive_rate_bound"),
  ]:
    for value in variants(at(record, path))[:2]:
      forge(release, changed(record, path, value))
      assert verify_release(release).problems, path


def test_derived_numbers_are_recomputed_not_only_compared_with_the_text(release, record):
  """With the texts brought in line too, what the accountants determine is still rejected."""
  for path in [
    ("epsilon",),
    ("tail_delta",),
    ("cross_check", "rdp_epsilon"),
    ("cross_check", "optimistic_pld_epsilon"),
    ("ledger", "epsilon"),
    ("stddev",),
    ("mean_stddev",),
    ("expected_batch_size",),
    ("target", "epsilon"),
    ("attacker", "mechanism_advantage_bound"),
    ("attacker", "membership_advantage_bound"),
    ("attacker", "trade_off", 1, "false_positive_rate"),
    ("attacker", "trade_off", 2, "true_positive_rate_bound"),
  ]:
    forged = changed(record, path, at(record, path) * 0.99)
    forge(release, fit_texts(forged))
    assert verify_release(release).problems, path


def test_less_noise_is_found_even_where_everything_else_was_made_to_fit(release, record, facts):
  """A forger who rewrites mechanism, ledger, derived numbers and texts still needs the epsilon."""
  honest = facts()
  weaker = dataclasses.replace(
    honest.mechanism, noise_multiplier=honest.mechanism.noise_multiplier * 0.99
  )
  ledger = Ledger()
  ledger.reserve(weaker, "training", unit=record["unit"])
  forged = copy.deepcopy(record)
  forged["mechanism"] = weaker.to_dict()
  forged["noise_multiplier"] = weaker.noise_multiplier
  forged["stddev"] = weaker.stddev
  forged["mean_stddev"] = weaker.stddev / record["expected_batch_size"]
  forged["releases"] = ledger.to_list()
  forged["ledger"] |= {"head": ledger.head}
  forge(release, fit_texts(forged))
  problems = verify_release(release).problems
  assert any(problem.startswith("epsilon is") for problem in problems)


def test_without_the_rebuild_numbers_would_pass(release, record, monkeypatch):
  """The broken variant: schema, hashes, header and card alone accept changed numbers."""
  for part in ("contradictions", "differences"):
    monkeypatch.setattr(f"dp_jax.statement.verify.rebuild.{part}", lambda *_: [])
  accepted = set()
  first = {path[0]: path for path in reversed(list(numbers(record)))}  # one of each field
  for path in first.values():
    forge(release, changed(record, path, variants(at(record, path))[0]))
    if not verify_release(release).problems:
      accepted.add(path[0])
  assert {"attacker", "stddev", "tail_delta"} <= accepted


@pytest.mark.parametrize("steps", [10**9, 2**53])
def test_absurd_mechanisms_are_rejected_without_an_exception(tmp_path, steps):
  """Made consistent throughout, but beyond any accountant: once an allocation of petabytes."""
  record = row_record("poisson")
  mechanism = privacy.Mechanism(privacy.Poisson(0.25), 2.0, steps, 1.5)
  ledger = Ledger()
  ledger.reserve(mechanism, "training", unit=record["unit"])
  record |= {"mechanism": mechanism.to_dict(), "steps": steps, "releases": ledger.to_list()}
  record["ledger"] |= {"head": ledger.head}
  write_release(tmp_path / "release", record)
  forge(tmp_path / "release", fit_texts(record))
  assert str(verify_release(tmp_path / "release")).startswith("rejected")


def test_a_rewritten_ledger_is_found(release, record):
  forged = copy.deepcopy(record)
  entry = forged["releases"][0]
  entry["mechanism"]["steps"] = 5
  entry["hash"] = entry_hash(entry)
  forged["ledger"]["head"] = entry["hash"]
  forge(release, forged)
  assert any("no entry is a release" in problem for problem in verify_release(release).problems)


def test_other_releases_on_the_same_data_are_added(tmp_path, facts):
  honest = facts()
  ledger = Ledger()
  ledger.reserve(honest.mechanism, "training", run="first", unit=honest.spec.unit)
  ledger.reserve(honest.mechanism, "training", run="second", unit=honest.spec.unit)
  both = dataclasses.replace(honest, ledger_entries=ledger.to_list())
  record = bound(privacy_json.privacy_record(both))
  assert record["ledger"]["epsilon"] > 1.2 * record["epsilon"]
  assert "With all 2 releases" in record["statement"]
  write_release(tmp_path / "release", record)
  assert verify_release(tmp_path / "release").problems == []
  forged = changed(record, ("ledger", "epsilon"), record["epsilon"])
  forge(tmp_path / "release", fit_texts(forged))
  assert any(
    "ledger.epsilon" in problem for problem in verify_release(tmp_path / "release").problems
  )


@pytest.mark.parametrize(
  ("path", "value"),
  [
    (("adjacency",), "replace_one"),
    (("sampling",), "poisson"),
    (("accountant",), "rdp"),
    (("unit",), "patient"),
    (("declared",), "private"),
    (("randomness", "test_key"), True),
    (("randomness", "source"), "key file given for a test"),
    (("pretrained_weights",), None),
    (("not_covered",), ["nothing"]),
    (("hyperparameter_selection",), "None was needed"),
    (("mechanism", "accountant"), "rdp"),
    (("mechanism", "adjacency"), "replace_one"),
    (("releases",), [{}]),
    (("releases", 0, "purpose"), "evaluation"),
    (("statement",), "Perfectly private."),
    (("accountant_version",), "dp-accounting 9"),
  ],
)
def test_changed_words_are_found_too(release, record, path, value):
  forge(release, changed(record, path, value))
  assert verify_release(release).problems


def test_a_left_out_warning_is_found(tmp_path, facts):
  spec = privacy.PrivacySpec(epsilon=1.0, delta=1e-3)
  record = bound(privacy_json.privacy_record(facts(spec=spec)))
  forged = changed(record, ("warnings",), [])
  write_release(tmp_path / "release", forged)
  forge(tmp_path / "release", fit_texts(forged))
  assert any("warnings" in problem for problem in verify_release(tmp_path / "release").problems)


def test_digest_and_manifest_are_checked(release, record):
  path = release / "privacy.json"
  path.write_text(json.dumps(changed(record, ("unit",), "patient")), encoding="utf-8")
  problems = verify_release(release).problems
  assert any("SHA-256" in problem for problem in problems)
  assert any("digest" in problem for problem in problems)


@pytest.mark.parametrize(
  ("before", "after", "message"),
  [
    (b"", b"", "parameters.total"),
    (b"[10,4]", b"[10,5]", "do not fit together"),
    (b"[10,4]", b"[-10,-4]", "is not a length"),
    (b"[10,4]", b"[4e1]", "is not a length"),
    (b'"F32"', b'"F64"', "do not fit together"),
    (b"\x00\x00", b"\x00", "bytes of numbers"),
    (b"{", b"[", "cannot be read"),
  ],
)
def test_other_parameters_are_found(release, record, before, after, message):
  path = release / "params.safetensors"
  data = path.read_bytes()
  size = int.from_bytes(data[:8], "little")
  head, body = data[8 : 8 + size], data[8 + size :]
  if before.startswith(b"\x00"):
    body = body[: len(body) // 2]
  elif before:
    head = head.replace(before, after).ljust(size)
  path.write_bytes(len(head).to_bytes(8, "little") + head + body)
  forged = record if before else changed(record, ("parameters", "total"), 41)
  forge(release, fit_texts(copy.deepcopy(forged)))
  problems = verify_release(release).problems
  assert any(message in problem for problem in problems), problems


def test_a_file_that_the_guarantee_does_not_cover_is_found(release):
  (release / "losses.jsonl").write_text('{"loss": 0.7}', encoding="utf-8")
  manifest.write_manifest(release)
  assert verify_release(release).problems == [
    "'losses.jsonl' is no part of a release: the guarantee does not cover it"
  ]


def test_a_release_without_its_model_card_is_found(release):
  (release / "model_card.md").unlink()
  manifest.write_manifest(release)
  assert any("model_card.md cannot be read" in each for each in verify_release(release).problems)


def test_a_reason_that_the_accountant_does_not_give_is_found(release, record):
  forged = changed(record, ("accountant_reason",), "proved by hand; discretisation 1e-9")
  forge(release, fit_texts(forged))
  assert any("accountant_reason" in problem for problem in verify_release(release).problems)


def test_a_version_that_only_looks_alike_is_found(release, record):
  # Both were found in "dp-accounting 0.6.0" when one was only looked for in the other.
  for version in ("0", ""):
    forge(release, fit_texts(changed(record, ("software", "dp-accounting"), version)))
    assert any("accountant_version" in problem for problem in verify_release(release).problems)


def test_a_number_of_units_that_should_be_secret_is_found(tmp_path):
  record = row_record("poisson unbounded")
  record["treated_as_public"]["num_units"] = 1440
  write_release(tmp_path / "release", record)
  forge(tmp_path / "release", fit_texts(record))
  problems = verify_release(tmp_path / "release").problems
  assert any("breaks the guarantee" in problem for problem in problems)


@pytest.mark.parametrize(
  ("budget", "message"),
  [
    ({"epsilon": 0.5}, "over the ledger's budget of 0.5"),
    ({"unit": "patient"}, "budget is for each 'patient'"),
    ({"adjacency": "replace_one"}, "budget is for adjacency replace_one"),
    ({}, None),
  ],
)
def test_a_budget_in_the_ledger_has_to_hold(release, record, budget, message):
  """A chain made anew around a budget that its releases overdraw, or that is another's."""
  fields = {"epsilon": 1.0, "delta": 1e-5, "unit": "scan", "adjacency": "zero_out"} | budget
  entries = [{"index": 0, "previous": "0" * 64, "kind": "budget", **fields}]
  entries[0]["hash"] = entry_hash(entries[0])
  entries.append({**record["releases"][0], "index": 1, "previous": entries[0]["hash"]})
  entries[1]["hash"] = entry_hash(entries[1])
  forged = changed(record, ("releases",), entries)
  forged["ledger"] |= {"head": entries[1]["hash"], "count": 2}
  forge(release, fit_texts(forged))
  problems = verify_release(release).problems
  assert problems == [] if message is None else any(message in problem for problem in problems)


def test_an_entry_that_calls_itself_something_else_is_found(tmp_path, release, record):
  """A second release that is renamed would otherwise count as an entry and cost nothing."""
  other = {**record["releases"][0], "index": 1, "previous": record["releases"][0]["hash"]}
  other["kind"] = "note"
  other["hash"] = entry_hash(other)
  forged = changed(record, ("releases",), [*record["releases"], other])
  forged["ledger"] |= {"head": other["hash"], "count": 2}
  forge(release, fit_texts(forged))
  assert any("neither a release" in problem for problem in verify_release(release).problems)


@pytest.mark.parametrize(
  "text", ["1e400", "1" + "0" * 400, '"\\ud800"', "[" * 3000 + "]" * 3000, "NaN", '{"a":1,"a":1}']
)
def test_values_that_no_number_or_text_holds_are_rejected_without_an_exception(
  release, record, text
):
  for path in (("epsilon",), ("unit",), ("mechanism", "clip_norm"), ("treated_as_public", "x")):
    forged = json.dumps(changed(record, path, "@")).replace('"@"', text)
    (release / "privacy.json").write_text(forged, encoding="utf-8")
    manifest.write_manifest(release)
    assert str(verify_release(release)).startswith("rejected")


def test_test_key_is_printed(tmp_path, facts):
  record = privacy_json.privacy_record(facts(test_key=True))
  write_release(tmp_path / "release", record)
  outcome = verify_release(tmp_path / "release")
  assert outcome.problems == []
  assert outcome.test_key
  assert str(outcome).startswith("not private: fixed seed")


def test_missing_or_odd_folders_are_rejected_without_an_exception(tmp_path, release):
  assert verify_release(tmp_path / "nowhere").problems
  assert str(verify_release(tmp_path / "nowhere")).startswith("rejected")
  (release / "privacy.json").write_text("[]", encoding="utf-8")
  manifest.write_manifest(release)
  assert verify_release(release).problems
