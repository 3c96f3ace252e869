"""The fault script in short: kills, SIGTERM, a damaged checkpoint; equal to the bit afterwards."""

from experiments import faults


def test_a_run_that_is_killed_stopped_and_damaged_is_the_undisturbed_one(tmp_path):
  result = faults.check(kills=2, steps=60, seed=3, folder=tmp_path, disk=False)
  assert result["ok"], result
  assert result["sigkill"]["kills"] == 2
  assert result["sigkill"]["parameters_equal"] and result["sigkill"]["budget_paid_once"]
  assert result["sigterm_and_damage"]["damage_noticed"]


def test_other_parameters_are_noticed(tmp_path):
  """The comparison itself: a run with another release is not called equal."""
  run = tmp_path / "run"
  for name, text in {
    "release/privacy.json": '{"epsilon": 1.0}', "ledger.jsonl": "{}\n",
    "private/training.jsonl": '{"step": 1}\n', faults.PARAMS: "a",
  }.items():  # fmt: skip
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)
  expected = faults.outcome(run)
  assert all(faults.compared(run, expected).values())
  (run / faults.PARAMS).write_text("b")
  (run / "ledger.jsonl").write_text("{}\n{}\n")
  assert faults.compared(run, expected) == {
    "parameters_equal": False, "epsilon_equal": True, "budget_paid_once": False,
    "every_step_logged_once": True,
  }  # fmt: skip
