"""Epsilon of each row of the table, from privacy.json alone and without any of this project's code.

`verify` rebuilds a record by the code that wrote it, and so shares its bugs. Here a process that
never imports dp_jax reads the files and asks dp-accounting, or for Gaussian releases without
sampling the formula of Balle and Wang 2018 (arXiv:1805.06530, theorem 8).
"""

import json
import subprocess
import sys

import pytest
from made_up_runs import ROW_RUNS, row_record

from dp_jax.privacy.sampling.schemes import rows

READER = r"""
import json, math, sys
import dp_accounting
from dp_accounting import dp_event, pld, rdp
from dp_accounting.privacy_accountant import NeighboringRelation as Relation
from scipy import optimize, stats

def gaussian(noise, steps, delta):
  mu = math.sqrt(steps) / noise
  def gap(epsilon):
    tail = stats.norm.cdf(mu / 2 - epsilon / mu)
    return tail - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta
  return optimize.brentq(gap, 0, 200, xtol=1e-12)

def epsilon(record):
  mechanism = record["mechanism"]
  scheme, adjacency = mechanism["sampling"], mechanism["adjacency"]
  noise, steps = mechanism["noise_multiplier"], mechanism["steps"]
  delta = record["delta"] - record["tail_delta"]
  twice = 2 if adjacency == "replace_one" else 1
  name = scheme["name"]
  if name == "full_batch":
    return gaussian(noise / twice, steps, delta)
  if name == "stream":
    passes = math.ceil(steps / math.ceil(scheme["num_units"] / scheme["expected_batch_size"]))
    return gaussian(noise / twice, passes, delta)
  plain = dp_accounting.GaussianDpEvent(noise)
  if name == "poisson":
    relation = Relation.REPLACE_ONE if twice == 2 else Relation.ADD_OR_REMOVE_ONE
    event = dp_accounting.PoissonSampledDpEvent(scheme["rate"], plain)
    accountant = pld.PLDAccountant(relation, 1e-4)
  elif name == "truncated_poisson":
    event = dp_event.TruncatedSubsampledGaussianDpEvent(
      scheme["num_units"], scheme["rate"], scheme["cap"], noise)
    accountant = pld.PLDAccountant(Relation.REPLACE_SPECIAL, 1e-4)
  elif name == "fixed_size":
    event = dp_accounting.SampledWithoutReplacementDpEvent(
      scheme["num_units"], scheme["expected_batch_size"], dp_accounting.GaussianDpEvent(noise / 2))
    orders = [1 + k / 20 for k in range(1, 200)] + list(range(11, 257))
    accountant = rdp.RdpAccountant(orders, Relation.REPLACE_ONE)
  return accountant.compose(event, steps).get_epsilon(delta)

found = {path: epsilon(json.load(open(path))) for path in sys.argv[1:]}
assert not [name for name in sys.modules if name.split(".")[0] == "dp_jax"]
print(json.dumps(found))
"""
# On another discretisation and other Renyi orders than the writer's; they agree to 1e-8.
TOLERANCE = 1e-6


@pytest.fixture(scope="module", name="read")
def _read(tmp_path_factory):
  """Of each row, epsilon as the other process finds it in privacy.json."""
  folder = tmp_path_factory.mktemp("records")
  paths = {name: folder / f"{index}.json" for index, name in enumerate(ROW_RUNS)}
  for name, path in paths.items():
    path.write_text(json.dumps(row_record(name)))
  command = [sys.executable, "-c", READER, *map(str, paths.values())]
  out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
  found = json.loads(out.splitlines()[-1])
  return {name: found[str(path)] for name, path in paths.items()}


@pytest.mark.parametrize("name", ROW_RUNS)
def test_epsilon_follows_from_the_file_alone(read, name):
  record = row_record(name)
  assert record["epsilon"] == pytest.approx(read[name], rel=TOLERANCE)


def test_every_row_of_the_table_is_here():
  records = [row_record(name) for name in ROW_RUNS]
  here = {(record["sampling"], record["adjacency"]) for record in records}
  assert here == {(row.scheme, row.adjacency) for row in rows()}
