"""browser.py -- a headless Chromium that a test drives through a pair of pipes, with the standard library."""
import json
import os
import shutil
import subprocess
import tempfile
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """one page; its messages are Chromium's DevTools protocol: JSON objects that end in a zero byte"""

    def __init__(self, width=1600, height=1000):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self.send = os.pipe()
        self.receive, theirs_out = os.pipe()

        def pipes():                                                    # Chromium reads from 3 and writes to 4
            os.dup2(theirs_in, 103)
            os.dup2(theirs_out, 4)
            os.dup2(103, 3)
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             f"--window-size={width},{height}", "--user-data-dir=" + self.folder.name, "about:blank"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self.rest, self.count, self.session, self.errors = b"", 0, None, []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Page.enable")

    def message(self):
        while b"\0" not in self.rest:
            block = os.read(self.receive, 1 << 20)
            if not block:
                raise RuntimeError("Chromium has ended")
            self.rest += block
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def call(self, method, **params):
        self.count += 1
        command = {"id": self.count, "method": method, "params": params}
        os.write(self.send, json.dumps({**command, "sessionId": self.session} if self.session else command).encode()
                 + b"\0")
        while True:
            found = self.message()
            if found.get("method") == "Runtime.exceptionThrown":
                self.errors.append(found["params"]["exceptionDetails"]["exception"].get("description"))
            if found.get("id") == self.count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]

    def value(self, script):
        """what a script computes; a promise is awaited"""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def open(self, path, anchor=""):
        """waits for the page to say that it is ready"""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url="file://" + os.path.abspath(path) + anchor)
        end = time.monotonic() + 120
        while not self.value("document.documentElement?.dataset.ready"):
            if self.errors or time.monotonic() > end:
                raise RuntimeError(f"{path}: not ready: {self.errors}")
            time.sleep(0.05)

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def mouse(self, x, y, click=True):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self):
        """Chromium is asked to end, as only it knows when its helpers have written their last file"""
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(30)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.send)
        os.close(self.receive)
        self.folder.cleanup()
