"""Headless Chromium, and pages in it, for the tests of files and pages that a browser opens."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "The tests of pages need Chromium. On Debian and Ubuntu, as root: apt-get install chromium. Elsewhere, set "
    "TINYLM_TEST_BROWSER to the path of Chromium, Chrome or Edge. To leave these tests out: BROWSER=none make test."
)
LIMIT = 60_000  # milliseconds that the browser may take on a busy machine
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\u2028"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. Root cannot use its sandbox, and the pages are our own."""
    path = os.environ.get("TINYLM_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail(MISSING, pytrace=False)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(executable_path=path, args=arguments, timeout=LIMIT)
        yield opened
        opened.close()


class Opened:
    """A page, with what it has printed, thrown and requested."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(LIMIT)
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path, ready: str = "#settings table") -> Page:
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(ready)
        return self.page


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    yield Opened(context.new_page())
    context.close()
