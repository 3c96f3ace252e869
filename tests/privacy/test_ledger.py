"""The ledger: reservations before releases, a shared budget, and a chain that shows tampering."""

import json
import multiprocessing

import pytest

from dp_jax.privacy import FullBatch, Mechanism, Poisson, PrivacySpec
from dp_jax.privacy.ledger import BudgetError, FinishedElsewhereError, Ledger, entry_hash
from dp_jax.privacy.tuning import Selection, account_selection

TRAINING = Mechanism(Poisson(0.1), 2.0, 20)
FULL = Mechanism(FullBatch(), 5.0, 1)
BUDGET = PrivacySpec(2.0, 1e-5)


def test_a_run_reserves_its_whole_plan():
  ledger = Ledger()
  assert (ledger.count, ledger.head, ledger.epsilon(1e-5)) == (0, "0" * 64, 0.0)
  entry = ledger.reserve(TRAINING, "training", unit="record")
  assert entry["mechanism"] == TRAINING.to_dict() and entry["purpose"] == "training"
  assert ledger.epsilon(1e-5) == TRAINING.epsilon(1e-5)
  assert ledger.epsilon(1e-5, step=7) == TRAINING.epsilon(1e-5, steps=7)
  assert ledger.epsilon(1e-5, step=0) == 0.0
  assert (ledger.count, ledger.head) == (1, entry["hash"])


def test_releases_add_up():
  ledger = Ledger()
  ledger.reserve(TRAINING, "training", unit="record")
  ledger.reserve(FULL, "evaluation", unit="record")
  assert ledger.epsilon(1e-5) > TRAINING.epsilon(1e-5)
  # A progress bar counts the newest in part and what came before it whole.
  assert ledger.epsilon(1e-5, step=0) == TRAINING.epsilon(1e-5)


def test_a_selection_is_entered_as_one():
  ledger = Ledger()
  selection = Selection(5.0, 1.0)
  ledger.reserve(TRAINING, "tuning", selection=selection, unit="record")
  expected = account_selection(TRAINING, selection, 1e-5).epsilon
  assert ledger.epsilon(1e-5) == pytest.approx(expected, rel=1e-12)
  assert Ledger.from_list(ledger.to_list()).releases == ledger.releases


@pytest.mark.parametrize("kind", ["note", "budget", None])
def test_an_entry_cannot_call_itself_something_that_costs_nothing(kind):
  ledger = Ledger()
  ledger.reserve(TRAINING, "training", run="a", unit="record")
  ledger.reserve(TRAINING, "training", run="b", unit="record")
  entries = ledger.to_list()
  entries[1]["kind"] = kind
  entries[1]["hash"] = entry_hash(entries[1])
  with pytest.raises(ValueError, match="entry 1 is neither a release nor"):
    Ledger.from_list(entries)


def test_a_list_keeps_its_budget(tmp_path):
  ledger = Ledger(tmp_path / "ledger.jsonl", BUDGET)
  ledger.reserve(FULL, "training", unit="record")
  again = Ledger.from_list(ledger.to_list())
  assert again.budget == ledger.budget == BUDGET
  assert again.within_budget(2.0) and not again.within_budget(2.1)
  assert Ledger().budget is None and Ledger().within_budget(1e9)


def test_the_list_is_a_copy_and_checks_out():
  ledger = Ledger()
  ledger.reserve(TRAINING, "training", unit="record")
  entries = ledger.to_list()
  again = Ledger.from_list(entries)
  assert (again.head, again.count) == (ledger.head, ledger.count)
  entries[0]["purpose"] = "evaluation"
  assert ledger.to_list()[0]["purpose"] == "training"


@pytest.mark.parametrize(
  "damage",
  [
    lambda entries: entries[0]["mechanism"].update(steps=1),
    lambda entries: entries[1].update(purpose="training"),
    lambda entries: entries.pop(0),
    lambda entries: entries.reverse(),
    lambda entries: entries[1].update(previous="0" * 64),
  ],
)
def test_changed_entries_show(damage):
  ledger = Ledger()
  ledger.reserve(TRAINING, "training", unit="record")
  ledger.reserve(FULL, "evaluation", unit="record")
  entries = ledger.to_list()
  damage(entries)
  with pytest.raises(ValueError, match="entry"):
    Ledger.from_list(entries)


def test_cut_off_and_rewritten_ledgers_show():
  ledger = Ledger()
  ledger.reserve(TRAINING, "training", unit="record")
  ledger.reserve(FULL, "evaluation", unit="record")
  head, count = ledger.head, ledger.count
  ledger.reserve(FULL, "evaluation", unit="record")
  ledger.check(head, count)  # growing is fine
  cut = Ledger.from_list(ledger.to_list()[:1])
  with pytest.raises(ValueError, match="cut off"):
    cut.check(head, count)
  cut.reserve(TRAINING, "evaluation", unit="record")
  with pytest.raises(ValueError, match="rewritten"):
    cut.check(head, count)


def test_the_hash_covers_everything_else():
  ledger = Ledger()
  entry = ledger.reserve(TRAINING, "training", unit="record")
  assert entry_hash(entry) == entry["hash"]
  for key in sorted(set(entry) - {"hash"}):
    assert entry_hash({**entry, key: "other"}) != entry["hash"]


def test_a_file_is_shared(tmp_path):
  path = tmp_path / "folder" / "ledger.jsonl"
  first = Ledger(path, BUDGET)
  first.reserve(TRAINING, "training", run="a", unit="record")
  second = Ledger(path)
  assert second.to_list() == first.to_list()
  second.reserve(FULL, "evaluation", run="b", unit="record")
  # The first has not looked since; it does so before it adds anything.
  first.reserve(FULL, "evaluation", run="c", unit="record")
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["kind"] for line in lines] == ["budget", "release", "release", "release"]
  assert lines == first.to_list() == Ledger(path).to_list()


def test_overdrawing_is_refused_and_enters_nothing(tmp_path):
  path = tmp_path / "ledger.jsonl"
  ledger = Ledger(path, BUDGET)
  ledger.reserve(TRAINING, "training", unit="record")
  before = path.read_text()
  with pytest.raises(BudgetError, match="over the ledger's budget of 2 "):
    Ledger(path).reserve(Mechanism(Poisson(0.1), 1.0, 100), "training", unit="record")
  assert path.read_text() == before
  with pytest.raises(BudgetError):
    Ledger(tmp_path / "new.jsonl", BUDGET).reserve(
      Mechanism(FullBatch(), 1.0, 1), "training", unit="record"
    )
  assert not (tmp_path / "new.jsonl").read_text()


def test_a_mechanism_calibrated_to_the_budget_fits():
  spec = PrivacySpec(1.0, 1e-5)
  from dp_jax.privacy import calibrate

  Ledger(None, spec).reserve(calibrate(spec, FullBatch(), 3), "training", unit="record")


def test_a_resumed_run_does_not_pay_twice(tmp_path):
  ledger = Ledger(tmp_path / "ledger.jsonl")
  entry = ledger.reserve(TRAINING, "training", run="a", unit="record")
  assert (
    Ledger(tmp_path / "ledger.jsonl").reserve(TRAINING, "training", run="a", unit="record") == entry
  )
  assert ledger.reserve(FULL, "evaluation", run="a", unit="record")["index"] == 1
  with pytest.raises(ValueError, match="already reserved another mechanism"):
    ledger.reserve(FULL, "training", run="a", unit="record")
  # Without a name, every reservation is a new one.
  unnamed = Ledger()
  unnamed.reserve(TRAINING, "training", unit="record")
  unnamed.reserve(TRAINING, "training", unit="record")
  assert unnamed.count == 2


def test_adjacencies_do_not_mix():
  ledger = Ledger()
  ledger.reserve(TRAINING, "training", unit="record")
  with pytest.raises(ValueError, match="replace_one, zero_out"):
    ledger.reserve(
      Mechanism(FullBatch(), 5.0, 1, adjacency="replace_one"), "training", unit="record"
    )
  with pytest.raises(ValueError, match="add_or_remove_one, zero_out"):
    Ledger(None, PrivacySpec(9.0, 1e-5, adjacency="add_or_remove_one")).reserve(
      FULL, "training", unit="record"
    )


def test_another_budget_than_the_files_is_refused(tmp_path):
  path = tmp_path / "ledger.jsonl"
  Ledger(path, BUDGET).reserve(FULL, "training", unit="record")
  assert Ledger(path, BUDGET).count == 2
  with pytest.raises(ValueError, match="has the budget"):
    Ledger(path, PrivacySpec(20.0, 1e-5))
  bare = tmp_path / "bare.jsonl"
  Ledger(bare).reserve(FULL, "training", unit="record")
  with pytest.raises(ValueError, match="without a budget"):
    Ledger(bare, BUDGET)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"index": 0', "unfinished last line"),
    ("nonsense\n", "not one JSON entry a line"),
    ("[]\n", "out of order"),
    ("{}\n", "out of order"),
  ],
)
def test_damaged_files_are_refused(tmp_path, text, message):
  path = tmp_path / "ledger.jsonl"
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    Ledger(path)


def test_a_file_rewritten_under_an_open_ledger_is_refused(tmp_path):
  path = tmp_path / "ledger.jsonl"
  ledger = Ledger(path)
  ledger.reserve(TRAINING, "training", unit="record")
  path.write_text("")
  with pytest.raises(ValueError, match="cut off"):
    ledger.reserve(FULL, "evaluation", unit="record")


def _reserve_ten(path):
  for _ in range(10):
    Ledger(path).reserve(FULL, "evaluation", unit="record")


def test_processes_take_turns(tmp_path):
  path = tmp_path / "ledger.jsonl"
  context = multiprocessing.get_context("spawn")
  workers = [context.Process(target=_reserve_ten, args=(path,)) for _ in range(2)]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join()
    assert worker.exitcode == 0
  ledger = Ledger(path)
  assert ledger.count == 20
  expected = Mechanism(FullBatch(), 5.0, 20).epsilon(1e-5)
  assert ledger.epsilon(1e-5) == pytest.approx(expected, rel=1e-9)


def test_purpose_is_needed():
  with pytest.raises(ValueError, match="say what is released"):
    Ledger().reserve(FULL, "", unit="record")


def test_units_do_not_mix(tmp_path):
  """Noise for each record says little about a person of many: the two do not add up."""
  path = tmp_path / "ledger.jsonl"
  Ledger(path).reserve(FULL, "training", unit="record")
  before = path.read_text()
  with pytest.raises(
    ValueError, match="for each 'record', and this one would be for each 'patient"
  ):
    Ledger(path).reserve(FULL, "training", unit="patient_id")
  assert path.read_text() == before
  with pytest.raises(ValueError, match="for each 'patient_id', and this one"):
    Ledger(None, PrivacySpec(9.0, 1e-5, "patient_id")).reserve(FULL, "training", unit="record")
  assert Ledger(path).units == ("record",)
  with pytest.raises(ValueError, match="say what is protected"):
    Ledger().reserve(FULL, "training", unit="")


def _of_an_earlier_version(path, budget=None):
  """A ledger whose entries do not say what they protect."""
  ledger = Ledger(None, budget)
  ledger.reserve(FULL, "training", unit="record", run="old")
  entries, previous = ledger.to_list(), "0" * 64
  for entry in entries:
    if entry["kind"] == "release":
      del entry["unit"]
    entry["previous"] = previous
    previous = entry["hash"] = entry_hash(entry)
  path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_entries_of_an_earlier_version_say_no_unit(tmp_path):
  path = tmp_path / "ledger.jsonl"
  _of_an_earlier_version(path)
  assert Ledger(path).units == (None,) and Ledger(path).epsilon(1e-5) == FULL.epsilon(1e-5)
  with pytest.raises(ValueError, match="Start a new ledger file"):
    Ledger(path).reserve(FULL, "training", unit="record", run="new")
  Ledger(path).reserve(FULL, "training", unit="record", run="old")  # a run that goes on
  assert Ledger(path).count == 1


def test_a_budget_says_the_unit_of_entries_of_an_earlier_version(tmp_path):
  path = tmp_path / "ledger.jsonl"
  _of_an_earlier_version(path, BUDGET)
  assert Ledger(path).units == ("record",)
  Ledger(path).reserve(FULL, "training", unit="record", run="new")
  assert Ledger(path).count == 3


def test_a_run_is_finished_once(tmp_path):
  path = tmp_path / "ledger.jsonl"
  ledger = Ledger(path)
  ledger.reserve(FULL, "training", unit="record", run="a")
  Ledger(path).finish("a", "first folder")
  Ledger(path).finish("a", "first folder")  # it was killed, and goes on
  with pytest.raises(FinishedElsewhereError, match="another copy of this run"):
    ledger.finish("a", "second folder")
  with pytest.raises(FinishedElsewhereError):
    ledger.check_unfinished("a", None)
  assert ledger.count == 2 and len(ledger.releases) == 1
  assert ledger.epsilon(1e-5) == FULL.epsilon(1e-5)
  with pytest.raises(ValueError, match="has reserved nothing"):
    ledger.finish("b", "first folder")


@pytest.mark.parametrize("run", ["a", "b", None])
def test_an_entry_cannot_finish_what_was_not_entered_or_twice(run):
  ledger = Ledger()
  ledger.reserve(FULL, "training", unit="record", run="a")
  ledger.finish("a", "token")
  entries = ledger.to_list()
  last = {**entries[-1], "index": 2, "previous": entries[-1]["hash"], "run": run}
  with pytest.raises(ValueError, match="entry 2 does not finish one run"):
    Ledger.from_list([*entries, {**last, "hash": entry_hash(last)}])
