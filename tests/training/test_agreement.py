"""What hosts say to each other, without processes: what each piece does."""

import numpy as np
import pytest
from support import small_config, write_npz

from dp_jax.parallel import hosts
from dp_jax.parallel.stopping import Stopped
from dp_jax.privacy.master_key import MasterKey
from dp_jax.training.agreement import agree_on_run
from dp_jax.training.setup.prepare import prepare
from dp_jax.training.zero_head import head_at_zero


def _as_hosts(monkeypatch, texts):
  monkeypatch.setattr(hosts, "gather", lambda text: [text, *texts])
  monkeypatch.setattr("jax.process_count", lambda: 1 + len(texts))


def test_hidden_facts_are_named_without_their_values(monkeypatch):
  said = []
  monkeypatch.setattr("jax.process_count", lambda: 2)
  monkeypatch.setattr(hosts, "gather", lambda text: said.append(text) or [text, text])
  hosts.agree({"a": {"b": 1}}, {"the number of units": 1234567})
  assert "1234567" not in said[0]
  other = said[0]
  _as_hosts(monkeypatch, [other, other.replace('"1"', '"3"')])
  with pytest.raises(hosts.SharedError) as error:
    hosts.agree({"a": {"b": 1}}, {"the number of units": 1234568})
  text = str(error.value)
  assert "host 1 differs from host 0: the number of units." in text
  assert "host 2 differs from host 0: a.b is 3, not 1; the number of units." in text
  assert "1234567" not in text and "1234568" not in text


def test_what_one_host_cannot_do_stops_all_with_its_name(monkeypatch):
  _as_hosts(monkeypatch, ["no such file"])
  with pytest.raises(hosts.SharedError, match="host 1: no such file All hosts stop"):
    hosts.on_all_hosts(lambda: 1)
  _as_hosts(monkeypatch, [""])
  assert hosts.on_all_hosts(lambda: 1) == 1


def test_one_host_alone_does_the_plain_thing():
  key = MasterKey(bytes(32))
  assert hosts.share_key(lambda: key) is key
  assert hosts.gather("x") == ["x"] and hosts.broadcast({"a": 1}) == {"a": 1}
  with pytest.raises(OSError):
    hosts.on_process_0(lambda: (_ for _ in ()).throw(OSError("disk")))
  hosts.agree({"a": 1}, {})


@pytest.mark.parametrize("method", ["least_squares", "feature_covariance", "newton", "auto"])
def test_solvers_are_refused_on_several_hosts(monkeypatch, method):
  config = small_config(
    solver={"method": method}, model={"name": "feature_head"}, train={"steps": 1},
    privacy={"epsilon": 3.0, "delta": 1e-4, "sampling": "full_batch"},
  )  # fmt: skip
  monkeypatch.setattr("jax.process_count", lambda: 2)
  with pytest.raises(ValueError, match=f"solver.method='{method}' is one pass on one device"):
    prepare(config)


def test_the_closed_form_of_a_first_step_is_for_one_host(monkeypatch):
  """Of several, the ordinary loop takes it."""
  run = prepare(small_config(
    model={"name": "linear", "head_init_std": 0.0},
    privacy={"epsilon": 3.0, "delta": 1e-4, "sampling": "full_batch"},
  ))  # fmt: skip
  assert head_at_zero(run) is not None
  monkeypatch.setattr("jax.process_count", lambda: 2)
  assert head_at_zero(run) is None


@pytest.mark.parametrize(("flags", "named"), [
  ({"coordinator": "a:1"}, "go together"), ({"num_processes": 2, "process_id": 0}, "go together"),
  ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id=2"),
  ({"coordinator": "a:1", "num_processes": 2, "process_id": 0, "heartbeat_seconds": 0},
   "heartbeat_seconds"),
])  # fmt: skip
def test_incomplete_flags_are_refused(flags, named):
  with pytest.raises(ValueError, match=named):
    hosts.join(hosts.Hosts(**flags))


def test_a_shared_end_is_not_taken_for_a_failure_of_one(monkeypatch):
  """Who fails alone ends at once (os._exit); what all raise at one point is raised."""
  monkeypatch.setattr("jax.process_count", lambda: 2)
  monkeypatch.setattr(hosts.os, "_exit", lambda code: pytest.fail(f"left with {code}"))
  for error in (Stopped("asked to stop"), hosts.SharedError("all")):
    with pytest.raises(type(error)), hosts.stopping_all(private=False):
      raise error


def _held_out(folder, level, count):
  """The same training data, and held-out data of a level and number."""
  write_npz(folder, np.zeros((6, 2, 2, 1), np.float32), np.arange(6) % 2, splits=("train",))
  images = np.full((count, 2, 2, 1), level, np.float32)
  write_npz(folder, images, np.arange(count) % 2, splits=("test",))
  return small_config(
    data={"source": "npz", "path": str(folder), "num_classes": 2}, model={"name": "linear"}
  )


@pytest.mark.parametrize(("level", "count", "differs"), [(0, 8, False), (1, 8, True), (0, 7, True)])
def test_hosts_of_other_held_out_data_stop_before_the_first_step(
  tmp_path, monkeypatch, level, count, differs
):
  """P18: else the accuracy is of a mixture, or all hosts stop after the training."""
  folder = tmp_path / "data"  # each host has a folder of its own under this name
  here = prepare(_held_out(folder, 0, 8))
  there = prepare(_held_out(folder, level, count))
  said = []
  monkeypatch.setattr("jax.process_count", lambda: 2)
  monkeypatch.setattr(hosts, "gather", lambda text: said.append(text) or [said[0], text])
  agree_on_run(here, None)
  if not differs:
    agree_on_run(there, None)
    return
  with pytest.raises(hosts.SharedError, match="the records of the evaluation split"):
    agree_on_run(there, None)
  assert here.data_digest == there.data_digest and here.fingerprint() == there.fingerprint()


def test_a_run_that_picks_a_step_by_held_out_data_goes_on_with_the_same(tmp_path):
  """P10: else evaluations on two data sets would be compared."""
  digests = []
  for level in (0, 1):
    config = _held_out(tmp_path / "data", level, 8)
    values = {**config.to_dict(), "eval": {"every": 1}}
    values["checkpoint"]["best_metric"] = "accuracy"
    values["data"]["declared"] = "public"
    digests.append(prepare(type(config).from_dict(values)).fingerprint()["held_out_digest"])
  assert digests[0] != digests[1]
