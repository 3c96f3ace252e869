"""Opens a report in headless Chromium: console, network, accessibility (axe-core), screenshots.

Chromium is driven over its DevTools pipe, so that nothing else has to be installed. The page is
opened at desktop and phone width, light and dark; it fails on a console message of level error, a
request to anything but the page itself, text that sticks out sideways, or a violation that axe-core
calls serious or critical.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

_AXE = flags.DEFINE_string("axe", None, "axe.min.js of the npm package axe-core", required=True)
_OUT = flags.DEFINE_string("out", None, "folder for screenshots; none are taken without it")
_CHROMIUM = flags.DEFINE_string("chromium", "chromium", "the browser")

VIEWS = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
SEVERE = ("serious", "critical")
_LOOK = "({overflow: document.documentElement.scrollWidth - window.innerWidth})"
_RUN_AXE = """(async () => {
  const found = await axe.run(document, {preload: false});
  const told = list => list.map(v => ({id: v.id, impact: v.impact, help: v.help,
    nodes: v.nodes.slice(0, 5).map(n => n.target.join(" ") + ": " + n.failureSummary)}));
  return {violations: told(found.violations), incomplete: told(found.incomplete),
    passes: found.passes.length};
})()"""


class Browser:
  """A headless Chromium and one page of it."""

  def __init__(self, binary: str, profile: str):
    to_browser, self._to = os.pipe()
    self._from, from_browser = os.pipe()
    command = [
      binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
      "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}",
      "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    # The protocol is on descriptors 3 and 4 of the browser.
    shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    self._process = subprocess.Popen(
      ["bash", "-c", shell, "browser", *command],
      pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    self._buffer, self._count, self._session = b"", 0, ""
    self.events: list[dict[str, Any]] = []
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    found = self.call("Target.attachToTarget", targetId=target, flatten=True)
    self._session = found["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.call(f"{domain}.enable")

  def call(self, method: str, **parameters: Any) -> dict[str, Any]:
    """Sends a command and waits for its result; events on the way are kept."""
    self._count += 1
    message = {"id": self._count, "method": method, "params": parameters}
    if self._session:
      message["sessionId"] = self._session
    os.write(self._to, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._receive()
      if answer.get("id") == self._count:
        if "error" in answer:
          raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

  def open(self, url: str, size: tuple[int, int], scheme: str) -> None:
    """Opens a page at a size and colour scheme, and waits until it is loaded."""
    width, height = size
    self.call(
      "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
      mobile=width < 600,
    )  # fmt: skip
    feature = {"name": "prefers-color-scheme", "value": scheme}
    self.call("Emulation.setEmulatedMedia", features=[feature])
    self.events.clear()
    self.call("Page.navigate", url=url)
    while not any(event["method"] == "Page.loadEventFired" for event in self.events):
      self._receive()

  def evaluate(self, expression: str) -> Any:
    """The value of an expression, awaited."""
    result = self.call(
      "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
    )
    if "exceptionDetails" in result:
      raise RuntimeError(str(result["exceptionDetails"]))
    return result["result"].get("value")

  def screenshot(self, path: Path) -> None:
    """The whole page as PNG."""
    data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
    path.write_bytes(base64.b64decode(data))

  def close(self) -> None:
    """Ends the browser."""
    self._process.terminate()
    self._process.wait()

  def _receive(self) -> dict[str, Any]:
    while b"\0" not in self._buffer:
      part = os.read(self._from, 1 << 16)
      if not part:
        raise RuntimeError("the browser ended")
      self._buffer += part
    text, self._buffer = self._buffer.split(b"\0", 1)
    message = json.loads(text)
    if "method" in message:
      self.events.append(message)
    return message


def look(browser: Browser, url: str, axe: str) -> dict[str, Any]:
  """What is wrong with the page that is open."""
  overflow = browser.evaluate(_LOOK)["overflow"]
  console = [_text(event) for event in browser.events if _is_error(event)]
  requests = [
    event["params"]["request"]["url"]
    for event in browser.events
    if event["method"] == "Network.requestWillBeSent"
  ]
  browser.evaluate(axe)
  found = browser.evaluate(_RUN_AXE)
  severe = [v for v in found["violations"] if v["impact"] in SEVERE]
  return {
    "console_errors": console,
    "external_requests": [r for r in requests if r != url and not r.startswith("data:")],
    "overflow_pixels": max(0, overflow),
    "rules_passed": found["passes"],
    "violations": found["violations"],
    "severe": len(severe),
    "incomplete": [v["id"] for v in found["incomplete"]],
  }


def _is_error(event: dict[str, Any]) -> bool:
  method, found = event["method"], event["params"]
  if method == "Log.entryAdded":
    return found["entry"]["level"] == "error"
  if method == "Runtime.consoleAPICalled":
    return found["type"] in ("error", "assert")
  return method == "Runtime.exceptionThrown"


def _text(event: dict[str, Any]) -> str:
  return json.dumps(event["params"])[:500]


def main(argv: list[str]) -> None:
  """Checks each page that is named; exits with 1 if one fails."""
  pages = [Path(name).resolve() for name in argv[1:]]
  if not pages:
    raise app.UsageError("name at least one report.html")
  axe, failed = Path(_AXE.value).read_text(), False
  with tempfile.TemporaryDirectory() as profile:
    browser = Browser(_CHROMIUM.value, profile)
    for page in pages:
      for view, size in VIEWS.items():
        for scheme in SCHEMES:
          browser.open(page.as_uri(), size, scheme)
          if _OUT.value:
            out = Path(_OUT.value)
            out.mkdir(parents=True, exist_ok=True)
            browser.screenshot(out / f"{page.stem}-{view}-{scheme}.png")
          found = look(browser, page.as_uri(), axe)
          print(json.dumps({"page": page.name, "view": view, "scheme": scheme, **found}))
          wrong = ("console_errors", "external_requests", "overflow_pixels", "severe")
          failed |= any(found[name] for name in wrong)
    browser.close()
  sys.exit(1 if failed else 0)


if __name__ == "__main__":
  app.run(main)
