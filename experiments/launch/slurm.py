"""One run on several nodes of a SLURM cluster: writes the batch script and submits it.

  python -m experiments.launch.slurm --nodes=2 --gpus_per_node=8 --time=24:00:00 \\
    -- --config=configs/digits.py --workdir=/shared/runs/digits

One process a GPU. JAX reads the addresses from SLURM. The work directory must lie on a file system
that all nodes share. A job that is pre-empted, or nears its time limit, gets SIGTERM: the run
saves, and the job is queued again, to go on from there.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from experiments.launch.commands import Runner, split_at_dashes


def script(options: argparse.Namespace, train: Sequence[str]) -> str:
  """The batch script."""
  command = shlex.join([options.python, "-m", "dp_jax", "train", "--distributed", *train])
  lines = [
    "#!/bin/bash",
    f"#SBATCH --job-name={options.name}",
    f"#SBATCH --nodes={options.nodes}",
    f"#SBATCH --ntasks-per-node={options.gpus_per_node}",
    f"#SBATCH --gpus-per-node={options.gpus_per_node}",
    f"#SBATCH --cpus-per-task={options.cpus_per_task}",
    f"#SBATCH --time={options.time}",
    "#SBATCH --requeue",
    f"#SBATCH --signal=B:TERM@{options.notice_seconds}",
    "#SBATCH --open-mode=append",
    *([f"#SBATCH --partition={options.partition}"] if options.partition else []),
    *([f"#SBATCH --account={options.account}"] if options.account else []),
    "set -u",
    "# A run that stops on SIGTERM exits with 0; the trap has it queued again, to go on.",
    "stopped= run=",
    """trap 'stopped=1; [ -z "$run" ] || kill -TERM $run' TERM""",
    f"srun --kill-on-bad-exit=1 {command} &",
    'run=$!; [ -z "$stopped" ] || kill -TERM $run',
    "wait $run; code=$?",
    'if [ -n "$stopped" ]; then wait $run; scontrol requeue "$SLURM_JOB_ID"; exit 0; fi',
    "exit $code",
  ]
  return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
  """Parses the flags and submits; returns the exit code."""
  own, train = split_at_dashes(argv)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--name", default="dp_jax", help="of the job")
  parser.add_argument("--nodes", type=int, required=True)
  parser.add_argument("--gpus_per_node", type=int, required=True)
  parser.add_argument("--cpus_per_task", type=int, default=8)
  parser.add_argument("--time", required=True, help="limit of one job, HH:MM:SS")
  parser.add_argument("--partition")
  parser.add_argument("--account")
  parser.add_argument("--notice_seconds", type=int, default=300, help="before the time limit")
  parser.add_argument("--python", default=sys.executable, help="on the nodes")
  parser.add_argument("--dry_run", action="store_true", help="print script and command only")
  options = parser.parse_args(own)
  if not any(a.startswith("--workdir=") for a in train):
    parser.error("give the arguments of `dp-jax train` after --, with --workdir=DIR")
  text = script(options, train)
  if options.dry_run:
    print(text)
  # Read from standard input, so that no file is left behind.
  return Runner(options.dry_run).try_run(["sbatch"], stdin=text)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
