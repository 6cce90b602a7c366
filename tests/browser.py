"""Drives Debian's Chromium through its chromedriver, which speaks HTTP and JSON."""
import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

KEYS = {"tab": "\ue004"}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says


class Browser:
    def __init__(self, address):
        self.address = address
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}
        self.address += "/session/" + self.send("POST", "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}}})["sessionId"]
        self.window(1440, 900)

    def send(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, method=method)
        try:
            with DIRECT.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def devtools(self, command, **parameters):
        return self.send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, url):
        self.send("POST", "/url", {"url": "about:blank"})  # else another #pair is no new page
        self.send("POST", "/url", {"url": str(url)})

    def run(self, script, *arguments):
        """What a script returns; it may be a promise."""
        return self.send("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait_for(self, script, timeout=10):
        end = time.monotonic() + timeout
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never came true: {script}"
            time.sleep(0.02)
        return value

    def element(self, selector):
        found, = self.send("POST", "/element", {"using": "css selector", "value": selector}).values()
        return f"/element/{found}"

    def click(self, selector):
        """As a reader does: in the middle of what is in view there."""
        self.send("POST", self.element(selector) + "/click")

    def press(self, *keys):
        presses = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self.send("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})

    def drag(self, start, stop):
        """With the mouse, from one point of the window to another."""
        (x, y), (to_x, to_y) = start, stop
        self.send("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [
            {"type": "pointerMove", "x": x, "y": y}, {"type": "pointerDown", "button": 0},
            {"type": "pointerMove", "x": to_x, "y": to_y}, {"type": "pointerUp", "button": 0}]}]})

    def window(self, width, height=900):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                      mobile=width < 800)

    def media(self, scheme="light", media=""):
        self.devtools("Emulation.setEmulatedMedia", media=media,
                      features=[{"name": "prefers-color-scheme", "value": scheme}])

    def console(self):
        """What was written there since the last call."""
        return [entry["message"] for entry in self.send("POST", "/se/log", {"type": "browser"})]

    def requests(self):
        """The addresses asked for since the last call."""
        events = [json.loads(entry["message"])["message"]
                  for entry in self.send("POST", "/se/log", {"type": "performance"})]
        return [event["params"]["request"]["url"] for event in events
                if event["method"] == "Network.requestWillBeSent"]


@contextlib.contextmanager
def chromium():
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    try:
        said = ""
        while not (port := re.search(r"successfully on port (\d+)", said)):
            assert (line := driver.stdout.readline()), f"chromedriver did not start: {said}"
            said += line
        browser = Browser(f"http://127.0.0.1:{port[1]}")
        yield browser
        browser.send("DELETE", "")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # the browser's processes too
        driver.wait()
        driver.stdout.close()
