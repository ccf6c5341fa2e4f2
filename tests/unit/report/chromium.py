"""A headless Chromium that a test drives by the DevTools protocol, through two pipes."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


class Tab:
  """One page, and what it complained of.

  Attributes:
    complaints: texts of its errors, warnings and blocked requests so far.
  """

  def __init__(self, write: int, read: int):
    """Open an empty page; Chromium reads commands from `write` and answers to `read`."""
    self.complaints: list[str] = []
    self._commands, self._answers = os.fdopen(write, "wb"), os.fdopen(read, "rb")
    self._numbers, self._session, self._seen = itertools.count(1), {}, []
    target = self.send("Target.createTarget", url="about:blank")["targetId"]
    session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    self._session = {"sessionId": session}
    for domain in ("Page", "Runtime", "Log"):
      self.send(f"{domain}.enable")

  def send(self, method: str, **params: Any) -> dict[str, Any]:
    """Give a command and wait for its result."""
    number = next(self._numbers)
    message = {"id": number, "method": method, "params": params, **self._session}
    self._commands.write(json.dumps(message).encode() + b"\0")
    self._commands.flush()
    while (answer := self._next()).get("id") != number:
      pass
    assert "error" not in answer, (method, answer)
    return answer["result"]

  def open(self, page: Path, *, width: int, dark: bool) -> None:
    """Load a page and wait until it is complete, on a screen that shows all of it."""
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self.send("Emulation.setEmulatedMedia", features=[theme])
    size = {"width": width, "height": 8000, "deviceScaleFactor": 1, "mobile": width < 600}
    self.send("Emulation.setDeviceMetricsOverride", **size)
    self._seen.clear()
    self.send("Page.navigate", url=page.as_uri())
    while "Page.loadEventFired" not in self._seen:
      self._next()

  def evaluate(self, script: str) -> Any:
    """The value of an expression in the page; a promise is waited for."""
    result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in result, result
    return result["result"].get("value")

  def close(self) -> None:
    """Close the pipes."""
    self._commands.close()
    self._answers.close()

  def _next(self) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"\0"):
      byte = self._answers.read(1)
      assert byte, "Chromium has ended"
      text += byte
    message = json.loads(text[:-1])
    method, params = message.get("method", ""), message.get("params", {})
    self._seen.append(method)
    if method == "Runtime.exceptionThrown":
      self.complaints.append(str(params["exceptionDetails"]))
    elif method == "Log.entryAdded":
      self.complaints.append(params["entry"]["text"])
    elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
      self.complaints.append(str(params["args"]))
    return message


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Tab]:
  """A browser whose profile is in `folder`, with one page."""
  assert PROGRAM is not None, "there is no Chromium"
  (commands, write), (read, answers) = os.pipe(), os.pipe()
  words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
  # It reads from descriptor 3 and writes to 4.
  script = f'exec 3<&{commands} 4>&{answers}; exec "$@"'
  with subprocess.Popen(
    ["bash", "-c", script, "bash", PROGRAM, *words, f"--user-data-dir={folder}"],
    pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  ) as process:  # fmt: skip
    os.close(commands)
    os.close(answers)
    tab = Tab(write, read)
    try:
      yield tab
      tab._session = {}
      tab.send("Browser.close")
    finally:
      tab.close()
      process.kill()
