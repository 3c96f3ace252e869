"""Several processes as one run: the same parameters, one key, agreement before step 0, one end."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import ROOT, finish, flags_of, free_port, key_file, lines, small_config, start

from dp_jax.evaluation.predictions import check_same_records, load_predictions
from dp_jax.training.run import train

PARAMS = "release/params.safetensors"
STEPS = 12


def _config(**changes):
  """A microbatch of 15 units is rounded up to 16, eight for each of two hosts."""
  return small_config(**{
    "train__steps": STEPS, "train__engine": "vmap", "train__microbatch_size": 15,
    "data__declared": "private", "model": {"name": "linear"}, "mesh": "data:-1",
    "privacy__accountant": "rdp",  # which answers at once
    **changes,
  })  # fmt: skip


def _start(config, workdir, key, rank, port, processes=2, heartbeat=10):
  return start(
    "train", *flags_of(config), f"--workdir={workdir}", f"--test_key_file={key}",
    f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}", f"--process_id={rank}",
    f"--heartbeat_seconds={heartbeat}", "--json",
  )  # fmt: skip


def _launch(config, workdir, key, processes=2):
  """By the launcher, as a user would."""
  arguments = [*flags_of(config), f"--workdir={workdir}", f"--test_key_file={key}", "--json"]
  return subprocess.run(
    [sys.executable, "-m", "experiments.launch.local", f"--processes={processes}",
     "--cpu_devices=1", "--", *arguments],
    cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
  )  # fmt: skip


pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A completed run of two processes."""
  folder = tmp_path_factory.mktemp("two")
  result = _launch(_config(), folder / "run", key_file(folder))
  assert result.returncode == 0, result.stderr
  return folder / "run", result


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  """The same run of one process."""
  folder = tmp_path_factory.mktemp("one")
  train(_config(mesh="data:1"), folder / "run", test_key_file=key_file(folder), progress=False)
  return folder / "run"


def _assert_same_parameters(folder, one):
  here, there = (load_file(run / PARAMS) for run in (folder, one))
  print("largest difference:", max(np.abs(here[name] - there[name]).max() for name in there))
  for name, value in there.items():
    np.testing.assert_allclose(here[name], value, rtol=0, atol=1e-5, err_msg=name)
  assert any(np.abs(value).max() > 0.01 for value in there.values())


def test_two_processes_train_what_one_trains(two, one):
  folder, result = two
  assert json.loads(result.stdout.splitlines()[-1])["steps"] == STEPS
  assert result.stdout.count("report:") == 1  # the second process says nothing
  _assert_same_parameters(folder, one)
  # Every held-out record, not the first process's share: groups and `compare` rest on it.
  tables = [load_predictions(run / "private/predictions.npz") for run in (folder, one)]
  assert tables[0].record.tolist() == list(range(200))
  check_same_records(tables)
  assert np.mean(tables[0].predicted == tables[1].predicted) > 0.99


def test_four_processes_train_what_one_trains(one, tmp_path):
  """The microbatch of 16 units is cut into four of each."""
  result = _launch(_config(), tmp_path / "run", key_file(tmp_path), processes=4)
  assert result.returncode == 0, result.stderr
  assert result.stdout.count("report:") == 1
  _assert_same_parameters(tmp_path / "run", one)
  assert len(list((tmp_path / "run" / "private").glob("training*.jsonl"))) == 4


def test_the_private_logs_of_the_hosts_are_that_of_one_host_in_parts(two, one):
  folder, _ = two
  logs = [folder / "private" / name for name in ("training.jsonl", "training-host1.jsonl")]
  assert all(log.stat().st_mode & 0o777 == 0o600 for log in logs)
  whole = lines(one / "private" / "training.jsonl")
  assert len(whole) == STEPS
  for entry, first, second in zip(whole, *map(lines, logs), strict=True):
    assert first.keys() == second.keys() == entry.keys()
    assert first["step"] == second["step"] == entry["step"]
    assert first["units"] == second["units"] == entry["units"]
    # Of each microbatch of 16 units the first eight are the first host's.
    pieces = [min(16, entry["units"] - start) for start in range(0, entry["units"], 16)]
    counts = sum(min(8, n) for n in pieces), sum(max(0, n - 8) for n in pieces)
    for name in ("loss", "clip_fraction"):
      mean = np.average([first[name], second[name]], weights=counts)
      np.testing.assert_allclose(mean, entry[name], rtol=1e-4)
    assert first["loss"] != second["loss"]


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


# Each checkpoint takes so long that a signal after the first comes before the last step.
LONG = {"train__steps": 120, "checkpoint__every": 10}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The parameters of a longer run."""
  folder = tmp_path_factory.mktemp("undisturbed")
  result = _launch(_config(**LONG), folder / "run", key_file(folder))
  assert result.returncode == 0, result.stderr
  return (folder / "run" / PARAMS).read_bytes()


def test_killing_one_stops_the_other_and_the_same_commands_go_on(undisturbed, tmp_path):
  config = _config(**LONG)
  key, workdir, port = key_file(tmp_path), tmp_path / "run", free_port()
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
  assert (workdir / PARAMS).read_bytes() == undisturbed
  for log in ("training.jsonl", "training-host1.jsonl"):
    assert [entry["step"] for entry in lines(workdir / "private" / log)] == list(range(1, 121))


def test_sigterm_to_one_makes_all_save_the_same_step_and_the_same_commands_go_on(
  undisturbed, tmp_path
):
  """As when the scheduler takes one machine away."""
  config = _config(**LONG)
  key, workdir, port = key_file(tmp_path), tmp_path / "run", free_port()
  processes = [_start(config, workdir, key, rank, port) for rank in range(2)]
  _wait_for_step(workdir, processes, 3)
  processes[1].send_signal(signal.SIGTERM)
  said = set()
  for process in processes:
    code, out, err = finish(process)
    assert code == 0, err
    said |= set(re.findall("asked to stop: step .*", out + err))
  (text,) = said  # and so of the same step
  (step,) = re.findall(r"step (\d+) of 120 is saved; the same command goes on from there", text)
  saved = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
  assert saved == int(step) and 3 <= saved < 120
  assert not (workdir / "release").exists()
  again = _launch(config, workdir, key)
  assert again.returncode == 0, again.stderr
  assert f"resuming after step {step}" in again.stderr
  assert (workdir / PARAMS).read_bytes() == undisturbed


def _other_key(folder):
  path = folder / "other.key"
  path.write_text("fedcba9876543210" * 4)
  path.chmod(0o600)
  return path


def test_a_process_that_differs_stops_all_before_step_0_and_is_named(tmp_path):
  """P18: another learning rate, other data and another key on the second host."""
  here, there = _config(), _config(train__learning_rate=0.2, data__num_records=150)
  keys, port = (key_file(tmp_path), _other_key(tmp_path)), free_port()
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
from dp_jax.parallel import hosts as distributed
from dp_jax.training import agreement, run
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
  port, config = free_port(), _config(train__steps=2)
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
