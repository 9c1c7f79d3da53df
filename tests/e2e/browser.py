"""Debian's Chromium, headless, spoken to over a pipe by the DevTools protocol: no driver, no websocket, no package.

JSON messages, each ended by a zero byte: ours on its file descriptor 3, its own on 4.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_DEADLINE_S = 30.0
CALL_DEADLINE_S = 20.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str:
    """Skip where there is no Chromium. `sh tests/setup_debian.sh` installs it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed: sh tests/setup_debian.sh")
    return program


class Browser:
    """One page of a fresh profile. `problems` are console errors and exceptions, `requests` the URLs that it asked for."""

    def __init__(self, folder: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._buffer = b""
        self._last_id = 0
        self._session = ""
        os.set_inheritable(to_read, True)
        os.set_inheritable(to_write, True)
        command = [find_chromium(), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        with (folder / "chromium.log").open("w") as log:
            self._child = subprocess.Popen(
                ["/bin/bash", "-c", shell, *command], pass_fds=(to_read, to_write), stdout=log, stderr=log
            )
        os.close(to_read)
        os.close(to_write)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask, and take note of what happened until the answer came."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + (CALL_DEADLINE_S if self._session else START_DEADLINE_S)
        while True:
            answer = self._next(until_s)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str, *, width: int, height: int, theme: str, mobile: bool = False) -> None:
        """Show a page as on a screen of that size, for somebody who prefers that theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)

    def wait_for(self, expression: str, deadline_s: float = 15.0) -> None:
        """Until it is true."""
        until_s = time.monotonic() + deadline_s
        while not self.evaluate(expression):
            assert time.monotonic() < until_s, f"not within {deadline_s} s: {expression}; {self.problems}"
            time.sleep(0.05)

    def key(self, key: str, code: int) -> None:
        """Press and let go."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """As PNG; the whole page, or what the screen shows of it."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        finally:
            self._child.kill()
            os.close(self._to)
            os.close(self._from)

    def _next(self, until_s: float) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "chromium does not answer"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "chromium has gone"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        _EVENTS.get(message.get("method", ""), lambda *_: None)(self, message.get("params", {}))
        return message


def _on_log(browser: Browser, params: dict[str, Any]) -> None:
    if params["entry"]["level"] in {"error", "warning"}:
        browser.problems.append(params["entry"]["text"])


def _on_console(browser: Browser, params: dict[str, Any]) -> None:
    if params["type"] in {"error", "warning", "assert"}:
        browser.problems.append(str([each.get("value") for each in params["args"]]))


_EVENTS: dict[str, Callable[[Browser, dict[str, Any]], None]] = {
    "Log.entryAdded": _on_log,
    "Runtime.consoleAPICalled": _on_console,
    "Runtime.exceptionThrown": lambda browser, params: browser.problems.append(str(params["exceptionDetails"])),
    "Network.requestWillBeSent": lambda browser, params: browser.requests.append(params["request"]["url"]),
}


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
