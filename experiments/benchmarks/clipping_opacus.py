"""Opacus, by hooks and by ghost clipping, as a ratio to its own plain step; prints JSON.

Run by `clipping.py --compare`, in an environment that has torch and opacus:

    python -m experiments.benchmarks.clipping_opacus --models=head,gpt_10m --repeats=3
"""

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from typing import Any

import opacus
import torch
from torch import nn

from experiments.benchmarks.clipping_torch_models import ROWS, TorchRow

# Bytes of per-unit gradients beyond which hooks are not tried.
MEMORY_LIMIT = 4 * 2**30


def make_step(
  mode: str, row: TorchRow, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> Any:
  """One step of SGD at learning rate zero: plain, hooks or ghost."""
  criterion: Any = nn.CrossEntropyLoss()
  trained = [p for p in model.parameters() if p.requires_grad]
  optimizer: Any = torch.optim.SGD(trained, lr=0.0)
  if mode != "plain":
    data = torch.utils.data.TensorDataset(inputs, labels)
    made = opacus.PrivacyEngine().make_private(
      module=model, optimizer=optimizer, criterion=criterion, noise_multiplier=0.0,
      data_loader=torch.utils.data.DataLoader(data, batch_size=len(inputs)), max_grad_norm=1.0,
      poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    if mode == "ghost":
      model, optimizer, criterion, _ = made
    else:
      model, optimizer, _ = made

  def step() -> None:
    optimizer.zero_grad()
    outputs = model(inputs)
    # Opacus has to be told which of the flattened losses belong to one unit.
    shape = {"shape": outputs.shape} if row.is_text and mode == "ghost" else {}
    criterion(outputs.view(-1, row.classes), labels.view(-1), **shape).backward()
    optimizer.step()

  return step


def measure(name: str, repeats: int) -> dict[str, Any]:
  """Times of the three, interleaved."""
  row = ROWS[name]
  torch.manual_seed(0)
  model = row.build()
  if row.is_text:
    inputs = torch.randint(row.classes, (row.batch, *row.shape))
    labels = torch.randint(row.classes, (row.batch, *row.shape))
  else:
    inputs, labels = torch.randn(row.batch, *row.shape), torch.randint(row.classes, (row.batch,))
  size = sum(p.numel() for p in model.parameters() if p.requires_grad)
  result: dict[str, Any] = {"parameters": size}
  modes = ["plain", "hooks", "ghost"]
  if 4 * size * row.batch > MEMORY_LIMIT:
    modes.remove("hooks")
  steps = {mode: make_step(mode, row, copy.deepcopy(model), inputs, labels) for mode in modes}
  times: dict[str, list[float]] = {mode: [] for mode in modes}
  for repeat in range(repeats + 1):
    for mode, step in steps.items():
      start = time.perf_counter()
      step()
      if repeat:
        times[mode].append(time.perf_counter() - start)
  medians = {mode: statistics.median(found) for mode, found in times.items()}
  result["plain_seconds"] = medians["plain"]
  for mode in ("hooks", "ghost"):
    result[f"{mode}_time_ratio"] = medians[mode] / medians["plain"] if mode in medians else None
  return result


def main() -> None:
  """Prints one JSON object: model -> result."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--models", default=",".join(ROWS))
  parser.add_argument("--repeats", type=int, default=3)
  options = parser.parse_args()
  warnings.simplefilter("ignore")
  results = {}
  for name in [m for m in options.models.split(",") if m in ROWS]:
    results[name] = measure(name, options.repeats)
    print(name, results[name], file=sys.stderr, flush=True)
  versions = {"version": opacus.__version__, "torch": torch.__version__}
  print(json.dumps({**versions, "results": results}))


if __name__ == "__main__":
  main()
