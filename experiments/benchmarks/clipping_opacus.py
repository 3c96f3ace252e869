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


class Block(nn.Module):
  """Two 3x3 convolutions beside a shortcut."""

  def __init__(self, inputs: int, outputs: int, stride: int):
    super().__init__()
    self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
    self.norms = nn.ModuleList([nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)])
    self.shortcut = None
    if stride != 1 or inputs != outputs:
      self.shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
      )

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """[N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""
    y = torch.relu(self.norms[0](self.first(x)))
    y = self.norms[1](self.second(y))
    return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet18() -> nn.Module:
  """ResNet-18 with group normalisation and a 3x3 stem, width 64, 10 classes."""
  layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
  channels = 64
  for stage in range(4):
    for index in range(2):
      outputs = 64 * 2**stage
      layers.append(Block(channels, outputs, 2 if stage and not index else 1))
      channels = outputs
  return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS: dict[str, Any] = {
  "head": (lambda: nn.Linear(1280, 1000), (1280,), 1000, 4096),
  "resnet18": (resnet18, (3, 32, 32), 10, 64),
}


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
