"""What comes after the release: nothing in it can take the release back, and failures are told."""

import contextlib
import errno
import json
import traceback
from collections.abc import Iterator

import jax

from dp_jax.errors import UserError
from dp_jax.files.atomic import write_text
from dp_jax.parallel.hosts import SharedError, gather, on_process_0
from dp_jax.parallel.stopping import Stopped
from dp_jax.training.checkpoints.workdir import WorkDir
from dp_jax.training.setup.prepare import Run


@contextlib.contextmanager
def release_stands(run: Run, folder: WorkDir) -> Iterator[None]:
  """Tells of a failure that the release is complete, and what to do.

  An exception can quote a record: of private data its text is kept under `private/`. Of several
  hosts, one that fails alone ends its process, which ends the others; it tells of that itself.

  Raises:
    ValueError: in place of whatever was raised, but for a full disk, which is told as elsewhere.
  """
  try:
    yield
  except Stopped:
    raise
  except Exception as error:
    shared = isinstance(error, SharedError)
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or (jax.process_count() > 1 and not shared):
      raise
    public = run.config.data.declared == "public"
    what = f"{type(error).__name__}: {error}"
    if not public:
      what = f"{type(error).__name__}, see private/evaluation_error.txt"
      with contextlib.suppress(OSError):
        write_text(folder.private / "evaluation_error.txt", traceback.format_exc())
    done = folder.unprotected if run.privacy is None else folder.release
    raise (SharedError if shared else UserError)(
      f"{str(done)!r} is complete, but what follows it, evaluation and report, failed ({what})."
      " Give the same command again for these alone, or evaluate the release by itself: no budget"
      " is spent again."
    ) from (error if public else None)


def note_bad_records(run: Run, folder: WorkDir) -> None:
  """Adds the malformed records that any host has met to `private/bad_records.json`.

  They had zero weight; which and how many is not public. A call of all hosts together.
  """
  mine = {
    split: {str(index): problem for index, problem in loader.bad_records.items()}
    for split, loader in (("train", run.loader), ("eval", run.eval_loader))
  }
  path = folder.private / "bad_records.json"
  texts = gather(json.dumps(mine))

  def write() -> None:
    found: dict[str, dict[str, str]] = {split: {} for split in mine}
    # An earlier process of this run may have met others.
    there = [path.read_text()] if path.exists() else []
    for text in (*there, *texts):
      for split, problems in json.loads(text).items():
        found[split].update(problems)
    if any(found.values()):
      write_text(path, json.dumps(found, indent=2) + "\n")

  on_process_0(write)
