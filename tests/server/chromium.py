"""A headless Chromium, driven over a pipe by its own protocol; no library in between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Page:
    """One tab. Use it as a context manager.

    Args:
        width, height: of the window, in CSS pixels.
        dark: what the person prefers.
        phone: whether it says that it is one.
    """

    def __init__(self, *, width: int = 1000, height: int = 700, dark: bool = False, phone: bool = False) -> None:
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._dark = dark
        self._number = 0
        self.console: list[str] = []
        """Errors and warnings that the page caused, violations of its policy among them."""
        self.requests: list[str] = []
        """Addresses that it asked for."""

    def __enter__(self) -> Page:
        self._profile = tempfile.mkdtemp(prefix="rorqual-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        assert BINARY is not None
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        browser = [BINARY, *flags, "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"]
        # It reads descriptor 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *browser],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._session = b"", None
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", **self._size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, address: str) -> None:
        """Load a page and wait for its scripts."""
        self._call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 10.0) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"never true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Insert text where the cursor is."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key that has a name: Enter, Escape, Tab."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        keys = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **keys, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def screenshot(self, path: Path | str) -> None:
        """Write what is seen as PNG."""
        Path(path).write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        raw, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.console.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
