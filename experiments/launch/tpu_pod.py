"""One run on a Cloud TPU slice: create, set up, run, collect, delete; spot slices start again.

  python -m experiments.launch.tpu_pod --name=digits --zone=us-central2-b --type=v4-16 --spot \\
    --shared=10.0.0.2:/runs -- --config=configs/digits.py --workdir=/mnt/shared/digits

Needs gcloud, logged in, and for slices of several hosts a file system that all of them can mount
(Filestore): the work directory lies there, and what a slice that is taken away had saved is still
there for the next. The release is copied to --out, and the slice is deleted, also when the run
fails.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from experiments.launch.commands import Runner, split_at_dashes

_MOUNT = "/mnt/shared"
_RETRY_SECONDS = 60
_READY = "READY"


def _tpu(options: argparse.Namespace, verb: str, *arguments: str) -> list[str]:
  return [
    "gcloud", "compute", "tpus", "tpu-vm", verb, *arguments, f"--zone={options.zone}",
    *([f"--project={options.project}"] if options.project else []),
  ]  # fmt: skip


def create(options: argparse.Namespace) -> list[str]:
  """Asks for the slice."""
  return _tpu(
    options, "create", options.name, f"--accelerator-type={options.type}",
    f"--version={options.runtime}", *(["--spot"] if options.spot else []),
  )  # fmt: skip


def on_all(options: argparse.Namespace, command: str) -> list[str]:
  """Runs a shell command on every host of the slice."""
  return _tpu(options, "ssh", options.name, "--worker=all", f"--command={command}")


def set_up(options: argparse.Namespace) -> list[list[str]]:
  """Copies the code to every host, installs it, and mounts the shared file system."""
  install = (
    "cd dp_jax && python3 -m venv .venv && .venv/bin/pip install -q -r requirements.lock"
    " 'jax[tpu]' && .venv/bin/pip install -q --no-deps -e ."
  )
  mount = (
    f"sudo apt-get install -qy nfs-common && sudo mkdir -p {_MOUNT} && (mountpoint -q {_MOUNT} ||"
    f" sudo mount -t nfs {options.shared} {_MOUNT}) && sudo chmod 1777 {_MOUNT}"
  )
  return [
    ["git", "archive", "--prefix=dp_jax/", "--output=dp_jax.tar", "HEAD"],
    _tpu(options, "scp", "dp_jax.tar", f"{options.name}:", "--worker=all"),
    on_all(options, "tar xf dp_jax.tar"),
    on_all(options, install),
    *([on_all(options, mount)] if options.shared else []),
  ]


def run(options: argparse.Namespace, train: Sequence[str]) -> list[str]:
  """Trains on every host at once; each finds the others through the TPU's own metadata."""
  command = shlex.join([".venv/bin/python", "-m", "dp_jax", "train", "--distributed", *train])
  return on_all(options, f"cd dp_jax && {command}")


def collect(options: argparse.Namespace, workdir: str) -> list[str]:
  """Copies the release and the report from the first host."""
  there = f"{options.name}:{workdir}/{{release,report.html}}"
  return _tpu(options, "scp", "--recurse", there, options.out, "--worker=0")


def delete(options: argparse.Namespace) -> list[str]:
  """Gives the slice back."""
  return _tpu(options, "delete", options.name, "--quiet")


def state(options: argparse.Namespace) -> list[str]:
  """Asks how the slice is."""
  return _tpu(options, "describe", options.name, "--format=value(state)")


def launch(options: argparse.Namespace, train: Sequence[str], workdir: str) -> int:
  """The whole sequence; a spot slice that was taken away is replaced, and the run goes on."""
  runner = Runner(options.dry_run)
  for attempt in range(options.restarts + 1):
    code = _attempt(runner, options, train, workdir)
    if code is not None or not options.spot:
      return 1 if code is None else code
    print(f"the slice was taken away (attempt {attempt + 1})", file=sys.stderr)
    time.sleep(options.retry_seconds)
  return 1


def _attempt(
  runner: Runner, options: argparse.Namespace, train: Sequence[str], workdir: str
) -> int | None:
  """The exit code of the run, or None if the slice is gone."""
  try:
    if runner.try_run(create(options)):
      return 1
    for command in set_up(options):
      if runner.try_run(command):
        return 1 if _is_there(runner, options) else None
    code = runner.try_run(run(options, train))
    if code:
      return code if _is_there(runner, options) else None
    return runner.try_run(collect(options, workdir))
  finally:
    runner.try_run(delete(options))


def _is_there(runner: Runner, options: argparse.Namespace) -> bool:
  return runner.ask(state(options)) == _READY


def main(argv: Sequence[str]) -> int:
  """Parses the flags and launches; returns the exit code."""
  own, train = split_at_dashes(argv)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--name", required=True, help="of the slice")
  parser.add_argument("--zone", required=True)
  parser.add_argument("--project", help="default: gcloud's own")
  parser.add_argument("--type", required=True, help="accelerator type, such as v4-16")
  parser.add_argument("--runtime", default="tpu-ubuntu2204-base", help="software version")
  parser.add_argument("--shared", help="HOST:/EXPORT of a file system, mounted at /mnt/shared")
  parser.add_argument("--out", default=".", help="where the release is copied to")
  parser.add_argument("--spot", action="store_true", help="cheaper, and may be taken away")
  parser.add_argument("--restarts", type=int, default=20, help="of a spot slice")
  parser.add_argument("--retry_seconds", type=float, default=_RETRY_SECONDS)
  parser.add_argument("--dry_run", action="store_true", help="print the commands only")
  options = parser.parse_args(own)
  workdirs = [a.partition("=")[2] for a in train if a.startswith("--workdir=")]
  if len(workdirs) != 1:
    parser.error("give the arguments of `dp-jax train` after --, with one --workdir=DIR")
  if options.spot and not options.shared:
    parser.error("--spot needs --shared: what the slice holds is lost with it")
  if options.shared and not workdirs[0].startswith(f"{_MOUNT}/"):
    parser.error(f"--workdir must lie under {_MOUNT}, which all hosts share")
  return launch(options, train, workdirs[0])


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
