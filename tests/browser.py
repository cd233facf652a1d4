"""A real browser for tests: headless Chromium, driven over its DevTools protocol through one websocket.

It notes what a test must not overlook: messages on the console, errors, and every address that was asked for.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from support import WAIT_S, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_S = 60.0


class Page:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []
        """Errors and warnings of the page, and exceptions that nobody caught."""
        self.asked: list[str] = []
        """Addresses of all requests."""
        self.refused: list[tuple[int, str]] = []
        """Status and address of answers above 399."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=ANSWER_S))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        said = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(said["request"]["url"])
            case "Network.responseReceived" if said["response"]["status"] > 399:
                self.refused.append((said["response"]["status"], said["response"]["url"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go there, and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        wait_until(lambda: self.run("document.readyState") == "complete" and self.run("location.href") != "about:blank")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, what: str = "") -> None:
        """Wait until an expression is true."""
        wait_until(lambda: bool(self.run(f"Boolean({script})")), WAIT_S, what or script)

    def text(self, selector: str) -> str:
        """What an element shows; empty where there is none."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def look_like(self, width: int, height: int, scheme: str) -> None:
        """Have a window of that size, and prefer light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.wait_for(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")

    def photograph(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen as a PNG; with `whole`, also what is below the window."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a browser of its own, which is gone afterwards. Skips where there is none."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip("no Chromium on the PATH (Debian: apt-get install chromium)")
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        flags = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={home}", "--no-first-run"]
        flags += ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"]
        flags += ["--hide-scrollbars", "--force-color-profile=srgb"]
        if os.getuid() == 0:
            flags.append("--no-sandbox")  # root may not have one
        process = subprocess.Popen(
            [binary, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_own_home(home)
        )
        try:
            page_file = Path(home, "DevToolsActivePort")

            def listens() -> bool:
                assert process.poll() is None, f"{binary} ended with {process.returncode}"
                return page_file.exists() and "\n" in page_file.read_text()

            wait_until(listens, WAIT_S, "Chromium listens")
            port = int(page_file.read_text().split("\n")[0])
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=ANSWER_S) as reply:
                (target,) = [found for found in json.load(reply) if found["type"] == "page"]
            with connect(
                target["webSocketDebuggerUrl"], max_size=1 << 26, open_timeout=ANSWER_S, ping_interval=None
            ) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _own_home(home: str) -> dict[str, str]:
    return os.environ | {"HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
