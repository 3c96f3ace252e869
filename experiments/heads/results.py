"""Where the studies of this folder keep their figures."""

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.json")


def read() -> dict[str, Any]:
  """All that was recorded."""
  return json.loads(PATH.read_text()) if PATH.exists() else {}


def record(*keys_and_value: Any) -> None:
  """record("table", FILE, METHOD, value) prints the value, and writes it under these keys."""
  *keys, value = keys_and_value
  print(*keys, value, flush=True)
  results = read()
  inner = results
  for key in keys[:-1]:
    inner = inner.setdefault(key, {})
  inner[keys[-1]] = value
  PATH.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
