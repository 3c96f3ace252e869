"""One run on GKE as a JobSet: writes the manifest, applies it, follows its log, collects, deletes.

  python -m experiments.launch.gke --name=digits --image=REGISTRY/dp_jax:TAG --hosts=2 \\
    --gpus_per_host=8 --claim=runs -- --config=configs/digits.py --workdir=/mnt/shared/digits

Needs kubectl, a cluster with the JobSet controller, an image with dp_jax in it, and a
PersistentVolumeClaim that all hosts can write (ReadWriteMany), mounted at /mnt/shared. A pod that
is taken away makes the JobSet start all pods again, and the run goes on from its last checkpoint.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from experiments.launch.commands import Runner, split_at_dashes

_MOUNT = "/mnt/shared"
_PORT = 1234


def manifest(options: argparse.Namespace, train: Sequence[str]) -> dict[str, Any]:
  """The JobSet: one pod a host; the first one's name is the coordinator's address."""
  name = options.name
  joined = (
    ["--distributed"]
    if options.tpu
    else [
      f"--coordinator={name}-host-0-0.{name}:{_PORT}", f"--num_processes={options.hosts}",
      "--process_id=$(JOB_COMPLETION_INDEX)",
    ]
  )  # fmt: skip
  resource, count = (
    ("google.com/tpu", options.chips_per_host)
    if options.tpu
    else ("nvidia.com/gpu", options.gpus_per_host)
  )
  container = {
    "name": "train",
    "image": options.image,
    "command": ["python", "-m", "dp_jax", "train", *train, *joined],
    "ports": [{"containerPort": _PORT}],
    "resources": {"limits": {resource: count}},
    "volumeMounts": [{"name": "shared", "mountPath": _MOUNT}],
  }
  selector = {}
  if options.tpu:
    selector = {
      "cloud.google.com/gke-tpu-accelerator": options.tpu,
      "cloud.google.com/gke-tpu-topology": options.topology,
    }
  if options.spot:
    selector["cloud.google.com/gke-spot"] = "true"
  pod = {
    "restartPolicy": "Never",
    # Longer than a step and a checkpoint: SIGTERM makes the run save.
    "terminationGracePeriodSeconds": 300,
    "nodeSelector": selector,
    "containers": [container],
    "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}}],
  }
  job = {
    "parallelism": options.hosts, "completions": options.hosts, "completionMode": "Indexed",
    "backoffLimit": 0, "template": {"spec": pod},
  }  # fmt: skip
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": name},
    "spec": {
      "failurePolicy": {"maxRestarts": options.restarts},
      "replicatedJobs": [{"name": "host", "replicas": 1, "template": {"spec": job}}],
    },
  }


def launch(options: argparse.Namespace, train: Sequence[str], workdir: str) -> int:
  """Applies, follows, collects and deletes."""
  runner = Runner(options.dry_run)
  # JSON is YAML: kubectl takes it as it is.
  text = json.dumps(manifest(options, train), indent=2)
  jobset, first = f"jobset/{options.name}", f"job/{options.name}-host-0"
  if options.dry_run:
    print(text)
  runner(["kubectl", "apply", "-f", "-"], stdin=text)
  try:
    runner.try_run(["kubectl", "wait", "--for=condition=Ready", "pod", "--timeout=30m",
                    f"--selector=jobset.sigs.k8s.io/jobset-name={options.name}"])  # fmt: skip
    runner.try_run(["kubectl", "logs", "--follow", first])
    code = runner.try_run(
      ["kubectl", "wait", "--for=condition=Completed", jobset, f"--timeout={options.timeout}"]
    )
    if code == 0 and options.collector:
      for what in ("release", "report.html"):
        runner(["kubectl", "cp", f"{options.collector}:{workdir}/{what}", f"{options.out}/{what}"])
    return code
  finally:
    runner.try_run(["kubectl", "delete", jobset])


def main(argv: Sequence[str]) -> int:
  """Parses the flags and launches; returns the exit code."""
  own, train = split_at_dashes(argv)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--name", required=True, help="of the JobSet")
  parser.add_argument("--image", required=True)
  parser.add_argument("--hosts", type=int, required=True)
  parser.add_argument("--gpus_per_host", type=int, default=8)
  parser.add_argument("--tpu", help="TPU type, such as tpu-v5-lite-podslice, in place of GPUs")
  parser.add_argument("--topology", help="of the TPU slice, such as 4x4")
  parser.add_argument("--chips_per_host", type=int, default=4)
  parser.add_argument("--claim", required=True, help="PersistentVolumeClaim of the runs")
  parser.add_argument("--spot", action="store_true", help="nodes that may be taken away")
  parser.add_argument("--restarts", type=int, default=20, help="of all pods together")
  parser.add_argument("--timeout", default="48h", help="for the whole run")
  parser.add_argument("--collector", help="a pod that mounts the claim, to copy the release from")
  parser.add_argument("--out", default=".", help="where the release is copied to")
  parser.add_argument("--dry_run", action="store_true", help="print manifest and commands only")
  options = parser.parse_args(own)
  workdirs = [a.partition("=")[2] for a in train if a.startswith("--workdir=")]
  if len(workdirs) != 1 or not workdirs[0].startswith(f"{_MOUNT}/"):
    parser.error(f"give the arguments of `dp-jax train` after --, with --workdir under {_MOUNT}")
  if options.tpu and not options.topology:
    parser.error("--tpu needs --topology")
  return launch(options, train, workdirs[0])


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
