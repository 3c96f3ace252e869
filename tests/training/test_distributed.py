"""Two processes as one run: the same parameters, one key, agreement before step 0, a shared end."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import ROOT, finish, flags_of, key_file, lines, small_config, start

from dp_jax.evaluation.predictions import check_same_records, load_predictions
from dp_jax.privacy.keys import MasterKey
from dp_jax.training import distributed
from dp_jax.training.prepare import prepare
from dp_jax.training.run import train
from dp_jax.training.zero_head import head_at_zero

PARAMS = "release/params.safetensors"
STEPS = 12


def _config(**changes):
  """A microbatch of 15 units is rounded up to 16, eight for each of two hosts."""
  return small_config(**{
    "train__steps": STEPS, "train__engine": "vmap", "train__microbatch_size": 15,
    "data__declared": "private", "model": {"name": "linear"}, "mesh": "data:-1", **changes,
  })  # fmt: skip


def _port():
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def _start(config, workdir, key, rank, port, processes=2, heartbeat=10):
  return start(
    "train", *flags_of(config), f"--workdir={workdir}", f"--test_key_file={key}",
    f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}", f"--process_id={rank}",
    f"--heartbeat_seconds={heartbeat}", "--json",
  )  # fmt: skip


def _launch(config, workdir, key):
  """By the launcher, as a user would."""
  arguments = [*flags_of(config), f"--workdir={workdir}", f"--test_key_file={key}", "--json"]
  return subprocess.run(
    [sys.executable, "-m", "experiments.launch.local", "--processes=2", "--cpu_devices=1", "--",
     *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
  )  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A completed run of two processes."""
  folder = tmp_path_factory.mktemp("two")
  result = _launch(_config(), folder / "run", key_file(folder))
  assert result.returncode == 0, result.stderr
  return folder / "run", result


def test_two_processes_train_what_one_trains(two, tmp_path):
  folder, result = two
  assert json.loads(result.stdout.splitlines()[-1])["steps"] == STEPS
  assert result.stdout.count("report:") == 1  # the second process says nothing
  train(_config(mesh="data:1"), tmp_path / "one", test_key_file=key_file(tmp_path), progress=False)
  here, there = (load_file(run / PARAMS) for run in (folder, tmp_path / "one"))
  for name, value in there.items():
    np.testing.assert_allclose(here[name], value, rtol=0, atol=1e-5, err_msg=name)
  assert any(np.abs(value).max() > 0.01 for value in there.values())
  one, other = (lines(run / "private/training.jsonl") for run in (folder, tmp_path / "one"))
  assert [entry["units"] for entry in one] == [entry["units"] for entry in other]
  assert one[0].keys() == other[0].keys()
  # Every held-out record, not the first process's share: groups and `compare` rest on it.
  tables = [load_predictions(run / "private/predictions.npz") for run in (folder, tmp_path / "one")]
  assert tables[0].record.tolist() == list(range(200))
  check_same_records(tables)
  assert np.mean(tables[0].predicted == tables[1].predicted) > 0.99


def test_only_the_first_process_writes_and_no_secret_is_shown(two):
  folder, result = two
  secret = "0123456789abcdef" * 4
  assert secret not in result.stdout + result.stderr
  # The keys are deleted once the last step is saved; nothing else ever held them.
  assert not [
    path for path in folder.rglob("*")
    if path.is_file() and secret.encode() in path.read_bytes()
  ]  # fmt: skip
  for path in (folder / "checkpoints").rglob("*"):
    assert path.stat().st_mode & 0o077 == 0, path
  assert sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != ".lock") == [
    "config.json", "ledger.jsonl", "report.html",
  ]  # fmt: skip


def _wait_for_step(workdir, processes, step):
  log = workdir / "private" / "training.jsonl"
  while not (log.exists() and log.read_text().count("\n") >= step):
    assert all(p.poll() is None for p in processes), [p.stderr.read() for p in processes]
    time.sleep(0.01)


def test_killing_one_stops_the_other_and_the_same_commands_go_on(tmp_path):
  config = _config(train__steps=60, checkpoint__every=5)
  key, workdir, port = key_file(tmp_path), tmp_path / "run", _port()
  processes = [_start(config, workdir, key, rank, port) for rank in range(2)]
  _wait_for_step(workdir, processes, 12)
  processes[1].send_signal(signal.SIGKILL)
  killed = time.monotonic()
  code, _, err = finish(processes[0])
  seconds = time.monotonic() - killed
  assert code != 0 and seconds < 60
  assert re.search("another host is\\s+gone|fatal errors|heartbeat", err), err
  assert not (workdir / "release").exists()
  again = _launch(config, workdir, key)
  assert again.returncode == 0, again.stderr
  assert "resuming after step" in again.stderr
  whole = _launch(config, tmp_path / "whole", key)
  assert whole.returncode == 0, whole.stderr
  assert (workdir / PARAMS).read_bytes() == (tmp_path / "whole" / PARAMS).read_bytes()


def _other_key(folder):
  path = folder / "other.key"
  path.write_text("fedcba9876543210" * 4)
  path.chmod(0o600)
  return path


def test_a_process_that_differs_stops_all_before_step_0_and_is_named(tmp_path):
  """P18: another learning rate, other data and another key on the second host."""
  here, there = _config(), _config(train__learning_rate=0.2, data__num_records=150)
  keys, port = (key_file(tmp_path), _other_key(tmp_path)), _port()
  processes = [
    _start(config, tmp_path / "run", keys[rank], rank, port)
    for rank, config in enumerate((here, there))
  ]
  for process in processes:
    code, _, err = finish(process)
    assert code == 2
    assert "host 1 differs from host 0" in err
    for difference in (
      "train.learning_rate is 0.2, not 0.1", "num_units is 150, not 200", "the test key file",
      "data_digest (the records)",
    ):  # fmt: skip
      assert difference in err
    assert "fedcba98" not in err and "01234567" not in err
  assert not (tmp_path / "run").exists()


# The broken variant: nobody compares, and each process draws noise with a key of its own.
UNCHECKED = """
import sys
from dp_jax.training import agreement, distributed, run
distributed.agree = agreement.agree = lambda shown, hidden: None
original = run.evaluate_state
def evaluate_state(run, state):
  import hashlib, numpy as np
  content = b"".join(np.asarray(x.addressable_data(0)).tobytes() for x in state.params.values())
  print("PARAMS", hashlib.sha256(content).hexdigest(), flush=True)
  return original(run, state)
run.evaluate_state = evaluate_state
from dp_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_different_keys_that_pass_as_replicated_are_caught(tmp_path):
  """Without the comparison both go on, with parameters that are taken for equal and are not."""
  port, config = _port(), _config(train__steps=2)
  keys = (key_file(tmp_path), _other_key(tmp_path))
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", UNCHECKED, "train", *flags_of(config),
       f"--workdir={tmp_path / 'run'}", f"--test_key_file={keys[rank]}",
       f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={rank}"],
      cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for rank in range(2)
  ]  # fmt: skip
  outputs = [finish(process) for process in processes]
  found = [re.findall("PARAMS (.*)", out) for _, out, _ in outputs]
  assert all(found), outputs
  assert found[0] != found[1]


# Without processes: what each piece does.


def _as_hosts(monkeypatch, texts):
  monkeypatch.setattr(distributed, "gather", lambda text: [text, *texts])
  monkeypatch.setattr("jax.process_count", lambda: 1 + len(texts))


def test_hidden_facts_are_named_without_their_values(monkeypatch):
  said = []
  monkeypatch.setattr("jax.process_count", lambda: 2)
  monkeypatch.setattr(distributed, "gather", lambda text: said.append(text) or [text, text])
  distributed.agree({"a": {"b": 1}}, {"the number of units": 1234567})
  assert "1234567" not in said[0]
  other = said[0]
  _as_hosts(monkeypatch, [other, other.replace('"1"', '"3"')])
  with pytest.raises(distributed.SharedError) as error:
    distributed.agree({"a": {"b": 1}}, {"the number of units": 1234568})
  text = str(error.value)
  assert "host 1 differs from host 0: the number of units." in text
  assert "host 2 differs from host 0: a.b is 3, not 1; the number of units." in text
  assert "1234567" not in text and "1234568" not in text


def test_what_one_host_cannot_do_stops_all_with_its_name(monkeypatch):
  _as_hosts(monkeypatch, ["no such file"])
  with pytest.raises(distributed.SharedError, match="host 1: no such file All hosts stop"):
    distributed.together(lambda: 1)
  _as_hosts(monkeypatch, [""])
  assert distributed.together(lambda: 1) == 1


def test_one_host_alone_does_the_plain_thing():
  key = MasterKey(bytes(32))
  assert distributed.share_key(lambda: key) is key
  assert distributed.gather("x") == ["x"] and distributed.from_first({"a": 1}) == {"a": 1}
  with pytest.raises(OSError):
    distributed.on_first(lambda: (_ for _ in ()).throw(OSError("disk")))
  distributed.agree({"a": 1}, {})


@pytest.mark.parametrize("method", ["least_squares", "feature_covariance", "newton", "auto"])
def test_solvers_are_refused_on_several_hosts(monkeypatch, method):
  config = small_config(
    solver={"method": method}, model={"name": "feature_head"}, train__steps=1,
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
    distributed.join(distributed.Hosts(**flags))
