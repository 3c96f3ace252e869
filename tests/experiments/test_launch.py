"""Launch scripts: what --dry_run prints, and what happens when a machine is taken away."""

import json
import os
import shlex
import stat

import pytest

from experiments.launch import gke, local, slurm, tpu_pod

TRAIN = ["--config=configs/digits.py", "--workdir=/mnt/shared/digits", "--config.train.steps=9"]
POD = ["--name=pod", "--zone=z", "--type=v4-16", "--shared=10.0.0.2:/runs", "--retry_seconds=0"]


def _printed(capsys):
  return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_local_prints_one_command_a_process(capsys):
  own = ["--processes=2", "--gpus_per_process=4", "--port=1234", "--dry_run"]
  assert local.main([*own, "--", *TRAIN]) == 0
  first, second = _printed(capsys)
  assert first[0] == "CUDA_VISIBLE_DEVICES=0,1,2,3" and second[0] == "CUDA_VISIBLE_DEVICES=4,5,6,7"
  assert first[2:] == [
    "-m", "dp_jax", "train", *TRAIN, "--coordinator=127.0.0.1:1234", "--num_processes=2",
    "--process_id=0", "--heartbeat_seconds=20",
  ]  # fmt: skip
  assert "--process_id=1" in second


def test_tpu_pod_prints_create_set_up_run_collect_delete(capsys):
  assert tpu_pod.main([*POD, "--spot", "--dry_run", "--out=here", "--", *TRAIN]) == 0
  commands = _printed(capsys)
  tpu = ["gcloud", "compute", "tpus", "tpu-vm"]
  assert [c[4] for c in commands if c[:4] == tpu] == [
    "create", "scp", "ssh", "ssh", "ssh", "ssh", "scp", "delete",
  ]  # fmt: skip
  create, run, collect = commands[0], commands[-3], commands[-2]
  assert create[5:] == [
    "pod", "--accelerator-type=v4-16", "--version=tpu-ubuntu2204-base", "--spot", "--zone=z",
  ]  # fmt: skip
  assert run[5:7] == ["pod", "--worker=all"]
  assert run[7] == (
    "--command=cd dp_jax && .venv/bin/python -m dp_jax train --distributed " + shlex.join(TRAIN)
  )
  assert "pod:/mnt/shared/digits/{release,report.html}" in collect and "here" in collect
  assert any("mount -t nfs 10.0.0.2:/runs /mnt/shared" in word for c in commands for word in c)


GCLOUD = """#!/bin/bash
echo "$@" >> "$LOG"
case "$*" in
  *describe*) cat "$STATE";;
  *dp_jax\\ train*) n=$(grep -c 'dp_jax train' "$LOG"); [ $n -gt "$FAILURES" ] || exit 255;;
esac
"""


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
  """Stands for gcloud: writes down its calls; the first FAILURES runs fail."""
  for name, text in (("gcloud", GCLOUD), ("git", "#!/bin/bash\n")):
    program = tmp_path / name
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  for name in ("LOG", "STATE"):
    (tmp_path / name).touch()
    monkeypatch.setenv(name, str(tmp_path / name))
  monkeypatch.setenv("FAILURES", "2")
  return tmp_path


def _verbs(folder):
  return [line.split()[3] for line in (folder / "LOG").read_text().splitlines()]


def test_a_spot_slice_that_is_taken_away_is_replaced_and_the_run_goes_on(gcloud):
  (gcloud / "STATE").write_text("PREEMPTED")
  assert tpu_pod.main([*POD, "--spot", "--", *TRAIN]) == 0
  verbs = _verbs(gcloud)
  assert verbs.count("create") == verbs.count("delete") == 3
  assert verbs[-2:] == ["scp", "delete"]


@pytest.mark.parametrize(("state", "flags"), [("READY", ["--spot"]), ("PREEMPTED", [])])
def test_a_run_that_fails_by_itself_is_not_repeated_and_the_slice_is_deleted(gcloud, state, flags):
  (gcloud / "STATE").write_text(state)
  assert tpu_pod.main([*POD, *flags, "--", *TRAIN]) != 0
  verbs = _verbs(gcloud)
  assert verbs.count("create") == 1 and verbs[-1] == "delete"


def _manifest(capsys, *flags):
  own = ["--name=digits", "--image=repo/dp_jax:1", "--hosts=4", "--claim=runs", "--dry_run"]
  assert gke.main([*own, *flags, "--", *TRAIN]) == 0
  text = capsys.readouterr().out
  content, end = json.JSONDecoder().raw_decode(text)
  return content, [shlex.split(line) for line in text[end:].strip().splitlines()]


def test_gke_on_gpus(capsys):
  content, commands = _manifest(capsys, "--spot", "--restarts=3")
  assert (content["apiVersion"], content["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  assert content["spec"]["failurePolicy"] == {"maxRestarts": 3}
  job = content["spec"]["replicatedJobs"][0]["template"]["spec"]
  assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
  pod = job["template"]["spec"]
  assert pod["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
  container = pod["containers"][0]
  assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
  assert container["command"] == [
    "python", "-m", "dp_jax", "train", *TRAIN, "--coordinator=digits-host-0-0.digits:1234",
    "--num_processes=4", "--process_id=$(JOB_COMPLETION_INDEX)",
  ]  # fmt: skip
  assert commands[0] == ["kubectl", "apply", "-f", "-"]
  assert commands[-1] == ["kubectl", "delete", "jobset/digits"]


def test_gke_on_tpus(capsys):
  content, _ = _manifest(capsys, "--tpu=tpu-v5-lite-podslice", "--topology=4x4")
  pod = content["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-tpu-topology": "4x4",
  }
  assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
  assert pod["containers"][0]["command"][-1] == "--distributed"


def test_slurm_script_saves_and_is_queued_again_on_sigterm(capsys, tmp_path):
  own = ["--nodes=2", "--gpus_per_node=8", "--time=24:00:00", "--python=python", "--dry_run"]
  assert slurm.main([*own, "--", *TRAIN]) == 0
  text = capsys.readouterr().out
  assert text.endswith("\nsbatch\n")
  for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=24:00:00",
               "--requeue", "--signal=B:TERM@300"):  # fmt: skip
    assert f"\n#SBATCH {line}\n" in text
  assert f"srun --kill-on-bad-exit=1 python -m dp_jax train --distributed {shlex.join(TRAIN)}" in (
    text
  )


@pytest.mark.parametrize(("send", "code", "requeued"), [
  ("kill -TERM $PPID; sleep 0.3; exit 0", 0, True), ("exit 0", 0, False), ("exit 3", 3, False),
])  # fmt: skip
def test_slurm_script_as_bash_runs_it(capsys, tmp_path, monkeypatch, send, code, requeued):
  """srun and scontrol are stand-ins; the first gets the batch script a SIGTERM, or none."""
  import subprocess

  slurm.main(["--nodes=1", "--gpus_per_node=1", "--time=1", "--dry_run", "--", *TRAIN])
  script = capsys.readouterr().out.removesuffix("\nsbatch\n")
  programs = {"srun": f"trap 'exit 0' TERM\n{send}", "scontrol": f"echo $@ > {tmp_path}/queued"}
  for name, body in programs.items():
    (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
    (tmp_path / name).chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  monkeypatch.setenv("SLURM_JOB_ID", "77")
  result = subprocess.run(["bash", "-c", script], check=False, timeout=60)
  assert result.returncode == code
  assert (tmp_path / "queued").exists() == requeued


@pytest.mark.parametrize(("module", "argv"), [
  (local, ["--processes=0", "--", *TRAIN]), (local, ["--processes=2"]),
  (tpu_pod, [*POD[:3], "--spot", "--", *TRAIN]), (tpu_pod, POD),
  (tpu_pod, [*POD, "--", "--workdir=/home/me"]),
  (gke, ["--name=a", "--image=b", "--hosts=2", "--claim=c", "--", "--workdir=/tmp"]),
  (gke, ["--name=a", "--image=b", "--hosts=2", "--claim=c", "--tpu=v5", "--", *TRAIN]),
  (slurm, ["--nodes=1", "--gpus_per_node=1", "--time=1"]),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(module, argv, capsys):
  with pytest.raises(SystemExit) as stopped:
    module.main(argv)
  assert stopped.value.code == 2 and "error:" in capsys.readouterr().err
