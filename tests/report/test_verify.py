"""`verify` accepts what a run wrote, and nothing in which a number was changed."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from made_up_runs import write_release

from dp_jax import privacy
from dp_jax.privacy.ledger import Ledger, entry_hash
from dp_jax.report import manifest, privacy_json, statement
from dp_jax.report.verify import verify_release

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
  return [value * 1.0001, value * 0.99, value * 2 + 1e-3, value / 3]


def forge(folder, record: dict[str, Any]) -> None:
  """Writes a record with its digest and the manifest brought in line, as a forger would."""
  record["digest"] = privacy_json.record_digest(record)
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
  assert statement.statement(record) in str(outcome)
  assert "verified" in str(outcome)


def test_the_order_of_keys_does_not_count(release, record):
  forged = json.loads(json.dumps(record, sort_keys=True))
  (release / "privacy.json").write_text(json.dumps(forged, indent=1), encoding="utf-8")
  manifest.write_manifest(release)
  assert verify_release(release).problems == []


@pytest.mark.parametrize(
  ("sampling", "adjacency", "steps"),
  [
    (privacy.Poisson(0.25), "zero_out", 20),
    (privacy.Poisson(0.25), "replace_one", 10),
    (privacy.FixedSize(60, 1437), "replace_one", 10),
    (privacy.Stream(100, 1437), "zero_out", 30),
  ],
  ids=lambda value: getattr(value, "name", str(value)),
)
def test_other_rows_are_accepted(tmp_path, facts, sampling, adjacency, steps):
  spec = privacy.PrivacySpec(epsilon=4.0, delta=1e-5, adjacency=adjacency)
  record = privacy_json.privacy_record(facts(spec=spec, sampling=sampling, steps=steps))
  write_release(tmp_path / "release", record)
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


def test_numbers_of_a_subsampled_run_count(tmp_path, facts):
  """The numbers that a Poisson run has and a full batch does not, and those of its accountants."""
  spec = privacy.PrivacySpec(epsilon=4.0, delta=1e-5)
  facts_ = facts(spec=spec, sampling=privacy.Poisson(0.25), steps=5)
  record = privacy_json.privacy_record(facts_)
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
    forged["statement"] = statement.statement(forged)
    forged["statement_long"] = statement.statement_long(forged)
    forge(release, forged)
    assert verify_release(release).problems, path


def test_less_noise_is_found_even_where_everything_else_was_made_to_fit(release, record, facts):
  """A forger who rewrites mechanism, ledger, derived numbers and texts still needs the epsilon."""
  honest = facts()
  weaker = dataclasses.replace(
    honest.mechanism, noise_multiplier=honest.mechanism.noise_multiplier * 0.99
  )
  ledger = Ledger()
  ledger.reserve(weaker, "training")
  forged = copy.deepcopy(record)
  forged["mechanism"] = weaker.to_dict()
  forged["noise_multiplier"] = weaker.noise_multiplier
  forged["stddev"] = weaker.stddev
  forged["mean_stddev"] = weaker.stddev / record["expected_batch_size"]
  forged["releases"] = ledger.to_list()
  forged["ledger"] |= {"head": ledger.head}
  forged["statement"] = statement.statement(forged)
  forged["statement_long"] = statement.statement_long(forged)
  forge(release, forged)
  problems = verify_release(release).problems
  assert any(problem.startswith("epsilon is") for problem in problems)


@pytest.mark.parametrize("stage", ["recompute", "consistency"])
def test_either_stage_alone_would_let_numbers_pass(release, record, monkeypatch, stage):
  """The broken variants: without one of the two stages, some changed number is accepted."""
  monkeypatch.setattr(f"dp_jax.report.verify.{stage}.problems", lambda *_: [])
  accepted = set()
  for path in numbers(record):
    forge(release, changed(record, path, variants(at(record, path))[0]))
    if not verify_release(release).problems:
      accepted.add(path[0])
  assert ("attacker" if stage == "recompute" else "stddev") in accepted


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
  ledger.reserve(honest.mechanism, "training", run="first")
  ledger.reserve(honest.mechanism, "training", run="second")
  record = privacy_json.privacy_record(dataclasses.replace(honest, ledger_entries=ledger.to_list()))
  assert record["ledger"]["epsilon"] > 1.2 * record["epsilon"]
  assert "With all 2 releases" in record["statement"]
  write_release(tmp_path / "release", record)
  assert verify_release(tmp_path / "release").problems == []
  forged = changed(record, ("ledger", "epsilon"), record["epsilon"])
  for name in ("statement", "statement_long"):
    forged[name] = getattr(statement, name)(forged)
  forge(tmp_path / "release", forged)
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
  record = privacy_json.privacy_record(facts(spec=spec))
  forged = changed(record, ("warnings",), [])
  for name in ("statement", "statement_long"):
    forged[name] = getattr(statement, name)(forged)
  write_release(tmp_path / "release", forged)
  forge(tmp_path / "release", forged)
  assert any("warnings" in problem for problem in verify_release(tmp_path / "release").problems)


def test_digest_and_manifest_are_checked(release, record):
  path = release / "privacy.json"
  path.write_text(json.dumps(changed(record, ("unit",), "patient")), encoding="utf-8")
  problems = verify_release(release).problems
  assert any("SHA-256" in problem for problem in problems)
  assert any("digest" in problem for problem in problems)


def test_parameters_of_another_size_are_found(release):
  data = (release / "params.safetensors").read_bytes()
  (release / "params.safetensors").write_bytes(data.replace(b"[10,4]", b"[10,5]"))
  manifest.write_manifest(release)
  assert any("parameters.total" in problem for problem in verify_release(release).problems)
  (release / "params.safetensors").write_bytes(b"\xff" * 64)
  manifest.write_manifest(release)
  assert any("safetensors" in problem for problem in verify_release(release).problems)


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
