"""Headless Chromium, driven over its DevTools pipe: what a page shows, asks for and complains of."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE = 60.0


class Browser:
    """One tab. `requests` are the addresses that it asked for, `complaints` the errors on its console."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        low_in, self._to = os.pipe()
        self._from, low_out = os.pipe()
        theirs_in, theirs_out = (fcntl.fcntl(low, fcntl.F_DUPFD, 50) for low in (low_in, low_out))
        os.close(low_in)
        os.close(low_out)
        plumbing = f'exec 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-; exec "$@"'  # reads 3, writes 4
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            ["bash", "-c", plumbing, "bash", CHROMIUM, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._buffer = b""
        self._number = 0
        self._tab: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._tab = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._tab is not None:
            message["sessionId"] = self._tab
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Be a window of that size, of someone who likes it dark or light."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        deadline = time.monotonic() + _PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"not in {_PATIENCE} s: {script}; {self.complaints}"
            time.sleep(0.05)
        return value

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self._tab = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "the browser says nothing"
            data = os.read(self._from, 1 << 20)
            if not data:
                raise OSError("the browser ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        match heard.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(heard["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(heard["params"]["exceptionDetails"]))
            case "Log.entryAdded" if heard["params"]["entry"]["level"] == "error":
                self.complaints.append(str(heard["params"]["entry"]))
        return heard
