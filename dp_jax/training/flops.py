"""How much of an accelerator's peak the model uses (model FLOP utilisation)."""

from typing import Any

import jax
import jax.numpy as jnp

from dp_jax.training.setup.prepare import Run

# Dense bfloat16 operations a second of one device, as its maker states them. The first name that
# the device's kind contains, in lower case, counts: "v5 lite" before "v5".
PEAK_FLOPS: dict[str, float] = {
  "tpu v4": 275e12,
  "tpu v5 lite": 197e12,
  "tpu v5e": 197e12,
  "tpu v5": 459e12,
  "tpu v6": 918e12,
  "a100": 312e12,
  "h100": 989e12,
  "h200": 989e12,
  "b200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Peak operations a second of a kind of device, None of one that is not known."""
  kind = device_kind.lower()
  return next((peak for name, peak in PEAK_FLOPS.items() if name in kind), None)


def flops_per_unit(run: Run) -> float | None:
  """Operations of the model's plain gradient for one unit, as XLA counts them; None if it cannot.

  What clipping adds is left out, so that engines can be compared by their utilisation.
  """

  def total(params: Any, units: Any, key: jax.Array) -> jax.Array:
    return jax.vmap(run.loss, (None, None, 0, None))(run.frozen, params, units, key).sum()

  units = run.task.made_up_units(1, run.loader.max_records_per_unit)
  lowered = jax.jit(jax.grad(total)).lower(run.params, units, jax.random.key(0))
  analysis = lowered.cost_analysis() or {}
  flops = float(analysis.get("flops", 0))
  return flops if flops > 0 and jnp.isfinite(flops) else None


def units_per_second_at_peak(run: Run) -> float | None:
  """Units a second that would keep all devices at their peak; None where that is not known."""
  peak = peak_flops(run.mesh.devices.flat[0].device_kind)
  if peak is None:
    return None
  flops = flops_per_unit(run)
  return None if flops is None else peak * run.mesh.size / flops
