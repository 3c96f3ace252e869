"""Which texts stand for no value: the one table of them.

It is a rule for what nobody declared. A declaration beats it: a cell that is the name of a class is
of that class, an id on a list of units is that unit, and the values of a group or of a split are as
they are, whatever they are called. Only an empty text is never a value.
"""

from __future__ import annotations

import numpy as np

from dp_jax.data.unit_ids import canonical

# Compared without regard to case, and without spaces around them.
ABSENT = (
  "", "na", "n/a", "#n/a", "#n/a n/a", "#na", "<na>", "nan", "-nan", "null", "none", ".", "-", "--",
  "?",
)  # fmt: skip
# Of an id these too: many people would be one unit.
ABSENT_IDS = (*ABSENT, "unknown", "missing", "not known")


def absent(
  texts: np.ndarray, declared: tuple[str, ...] | None, usual: tuple[str, ...]
) -> np.ndarray:
  """Which texts stand for no value.

  Args:
    texts: [n] ids, as `dp_jax.data.unit_ids.canonical` gives them.
    declared: what does, in place of the usual; compared as ids are. None takes the usual.
    usual: ABSENT or ABSENT_IDS.

  Returns:
    bool[n].
  """
  if declared is not None:
    return np.isin(texts, canonical(np.array(["", *declared])))
  distinct, inverse = np.unique(texts, return_inverse=True)
  return np.array([text.casefold() in usual for text in distinct.tolist()], bool)[inverse]
