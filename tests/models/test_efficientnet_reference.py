"""EfficientNet-Lite against the PyTorch implementation that its weights were published for.

Needs the extra [reference] (PyTorch), and [backbones] for the weights of lite2.
"""

import jax
import numpy as np
import pytest
from test_efficientnet_lite import build, photographs

from dp_jax.models.vision.efficientnet_lite import pretrained, weights_file

torch = pytest.importorskip("torch", reason="needs the extra [reference]: PyTorch")
published = pytest.importorskip("efficientnet_lite_pytorch", reason="needs the extra [reference]")


@pytest.mark.parametrize(("size", "side"), [
  ("lite0", 224), ("lite0", 160), ("lite0", 97), ("lite2", 260), ("lite2", 160),
])  # fmt: skip
def test_features_and_logits_agree_to_1e_3(size, side):
  images = (photographs(side).astype(np.float32) - 127) / 128
  reference = published.EfficientNet.from_name(f"efficientnet-{size}", image_size=side)
  reference.load_state_dict(torch.load(weights_file(size), weights_only=True))
  reference.eval()
  with torch.no_grad():
    inputs = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    expected = (
      reference.extract_features(inputs).mean(dim=(2, 3)).numpy(), reference(inputs).numpy()
    )  # fmt: skip
  model, _ = build(size, side)

  @jax.jit
  def ours(arrays, x):
    module = model.bind(arrays)
    return module.features(x), module(x)

  for got, want in zip(ours(pretrained(size)[0], images), expected, strict=True):
    difference = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    print(f"{size} at {side}: relative difference {difference.max():.1e}")
    assert difference.max() < 1e-3
