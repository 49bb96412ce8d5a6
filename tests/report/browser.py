"""Headless Chromium for the tests of the report."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "The tests of the report need Chromium. On Debian and Ubuntu, as root: apt-get install chromium. Elsewhere, set "
    "TINYLM_TEST_BROWSER to the path of Chromium, Chrome or Edge. To leave these tests out: BROWSER=none make test."
)
LIMIT = 60_000  # milliseconds that the browser may take on a busy machine


def find_browser() -> str:
    """The path of Chromium. The test fails, with advice, if there is none."""
    path = os.environ.get("TINYLM_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail(MISSING, pytrace=False)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. Root cannot use its sandbox, and the pages are our own."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=LIMIT
        )
        yield opened
        opened.close()
