"""Fixtures: the facts of a made-up run, and its privacy record."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from made_up_runs import bound, make_facts

from dp_jax.report import privacy_json


@pytest.fixture(name="facts")
def _facts() -> Callable[..., privacy_json.ReleaseFacts]:
  """Facts of a run, with fields replaced by keyword."""
  return make_facts


@pytest.fixture(name="shared_record", scope="session")
def _shared_record() -> dict[str, Any]:
  return bound(privacy_json.privacy_record(make_facts()))


@pytest.fixture(name="record")
def _record(shared_record: dict[str, Any]) -> dict[str, Any]:
  """A valid privacy record on data declared public; a copy, to change at will."""
  return copy.deepcopy(shared_record)
