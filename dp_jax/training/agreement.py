"""What all hosts must have in common, compared before step 0 (P18)."""

import hashlib
import secrets
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dp_jax.errors import UserError
from dp_jax.files.atomic import write_text
from dp_jax.parallel.hosts import (
  agree,
  broadcast,
  code_version,
  is_process_0,
  on_all_hosts,
  on_process_0,
)
from dp_jax.parallel.mesh import describe
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling import Sampler
from dp_jax.training.setup.prepare import Run

_FIRST_STEPS = 3
_PRIVATE = ("data_digest", "units_digest")


def agree_on_run(run: Run, fixed_key: MasterKey | None) -> None:
  """Compares configuration, code, data, model, mechanism, and the key file if there is one.

  Held-out data too: each host evaluates its share of them, and all must have as many. A run that
  goes on does not compare them with those that it began with, unless it picks a step by them
  (`Run.fingerprint`): no guarantee is about them.

  Raises:
    SharedError: on every host, naming what differs.
  """
  shown: dict[str, Any] = {
    **run.fingerprint(),
    "dp_jax": code_version(),
    "mesh": describe(run.mesh),
  }
  hidden = {f"{name} (the records)": shown.pop(name, None) for name in _PRIVATE}
  hidden["the number of units"] = run.loader.num_units
  held_out = run.eval_loader.source
  hidden["held_out_digest (the records of the evaluation split)"] = held_out.fingerprint()
  hidden["the number of records of the evaluation split"] = len(held_out)
  hidden["the test key file"] = None if fixed_key is None else fixed_key.digest()
  agree(shown, hidden)


def agree_on_draws(key: MasterKey, sampler: Sampler, step: int, steps: int) -> None:
  """Compares the key as it is used here, where to go on, and the units of the first steps.

  Raises:
    SharedError: on every host, naming what differs.
  """
  digest = hashlib.sha256()
  for first in range(step, min(step + _FIRST_STEPS, steps)):
    digest.update(np.ascontiguousarray(sampler.indices(first)).tobytes())
  hidden = {"the secret key": key.digest(), "the units of the first steps": digest.hexdigest()}
  agree({"the step to start from": step}, hidden)


def check_shared(folder: Path, name: str = "workdir") -> None:
  """Refuses a folder that is not one and the same on all hosts; `name` is what messages call it.

  Raises:
    SharedError: on every host.
  """
  if jax.process_count() == 1:
    return
  mark = folder / ".hosts"
  token = broadcast(secrets.token_hex(16))
  on_process_0(lambda: write_text(mark, token))

  def look() -> None:
    if not mark.exists() or mark.read_text() != token:
      raise UserError(
        f"{name} {str(folder)!r} is not the one of host 0: put it on a file system that all"
        " hosts share."
      )

  on_all_hosts(look)
  if is_process_0():
    mark.unlink()
