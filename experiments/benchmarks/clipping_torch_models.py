"""The models of the clipping benchmark in PyTorch, of the same sizes, with random weights.

Made of modules that Opacus has rules for: tokens of a language model and logits have tables of
their own (it refuses tied ones), convolutions are not standardised, and the vision transformer
looks its positions up and takes the mean of the tokens instead of a class token.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
  """Two 3x3 convolutions beside a shortcut."""

  def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 32):
    super().__init__()
    self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
    self.norms = nn.ModuleList([nn.GroupNorm(groups, outputs), nn.GroupNorm(groups, outputs)])
    self.shortcut = None
    if stride != 1 or inputs != outputs:
      self.shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups, outputs)
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


def wide_resnet() -> nn.Module:
  """WRN-16-4 without weight standardisation, 16 groups, 10 classes."""
  layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1)]
  channels = 16
  for stage in range(3):
    for index in range(2):
      outputs = 64 * 2**stage
      layers.append(Block(channels, outputs, 2 if stage and not index else 1, groups=16))
      channels = outputs
  return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class LowRank(nn.Module):
  """A frozen linear layer, and the product of two small trained ones beside it."""

  def __init__(self, inputs: int, outputs: int, rank: int):
    super().__init__()
    self.frozen = nn.Linear(inputs, outputs)
    self.frozen.requires_grad_(False)
    self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """[..., inputs] -> [..., outputs]."""
    return self.frozen(x) + 2.0 * self.up(self.down(x))


def _linear(inputs: int, outputs: int, rank: int) -> nn.Module:
  return LowRank(inputs, outputs, rank) if rank else nn.Linear(inputs, outputs)


class Layer(nn.Module):
  """A pre-norm transformer block."""

  def __init__(self, width: int, heads: int, causal: bool, rank: int):
    super().__init__()
    self.heads, self.causal = heads, causal
    self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
    self.qkv, self.out = _linear(width, 3 * width, rank), _linear(width, width, rank)
    self.up, self.down = _linear(width, 4 * width, rank), _linear(4 * width, width, rank)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """[N, T, width] -> the same."""
    count, tokens, width = x.shape
    qkv = self.qkv(self.norms[0](x)).view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(*qkv, is_causal=self.causal)
    x = x + self.out(y.transpose(1, 2).reshape(count, tokens, width))
    return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
  """A language model (vocab) or a vision transformer (patch), ending in logits."""

  def __init__(
    self, width: int, depth: int, heads: int, outputs: int, positions: int, *, vocab: int = 0,
    patch: int = 0, rank: int = 0,
  ):  # fmt: skip
    super().__init__()
    self.is_text = bool(vocab)
    self.first = nn.Embedding(vocab, width) if vocab else nn.Conv2d(3, width, patch, patch)
    self.positions = nn.Embedding(positions, width)
    self.layers = nn.ModuleList([Layer(width, heads, bool(vocab), rank) for _ in range(depth)])
    self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=not vocab)
    if rank:
      for module in (self.first, self.positions, self.norm, self.head):
        module.requires_grad_(False)
      for layer in self.layers:
        layer.norms.requires_grad_(False)

  def forward(self, inputs: torch.Tensor) -> torch.Tensor:
    """Tokens [N, T] -> [N, T, vocab], or images [N, 3, H, W] -> [N, outputs]."""
    x = self.first(inputs)
    if not self.is_text:
      x = x.flatten(2).transpose(1, 2)
    x = x + self.positions(torch.arange(x.shape[1]).repeat(x.shape[0], 1))
    for layer in self.layers:
      x = layer(x)
    return self.head(self.norm(x if self.is_text else x.mean(1)))


@dataclasses.dataclass(frozen=True)
class TorchRow:
  """A row: the model, the shape of one input, how many classes, and units of a step."""

  build: Callable[[], nn.Module]
  shape: tuple[int, ...]
  classes: int
  batch: int
  is_text: bool = False


def _text(width: int, depth: int, heads: int, vocab: int, batch: int, rank: int = 0) -> TorchRow:
  return TorchRow(
    lambda: Transformer(width, depth, heads, vocab, 128, vocab=vocab, rank=rank),
    (128,), vocab, batch, is_text=True,
  )  # fmt: skip


def _vit(width: int, heads: int) -> TorchRow:
  return TorchRow(
    lambda: Transformer(width, 12, heads, 1000, 196, patch=16), (3, 224, 224), 1000, 16
  )


ROWS: dict[str, TorchRow] = {
  "head": TorchRow(lambda: nn.Linear(1280, 1000), (1280,), 1000, 4096),
  "resnet18": TorchRow(resnet18, (3, 32, 32), 10, 64),
  "wrn16_4": TorchRow(wide_resnet, (3, 32, 32), 10, 64),
  "vit_ti": _vit(192, 3),
  "vit_s": _vit(384, 6),
  "gpt_10m": _text(320, 6, 5, 8192, 8),
  "gpt_124m": _text(768, 12, 12, 50257, 4),
  "lora": _text(768, 12, 12, 50257, 4, rank=8),
}
