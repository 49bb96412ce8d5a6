"""The server's two pages in headless Chromium, with answers made up here."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tinylm.serving import server

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"


class Answers:
    """A page of the server whose requests are answered with `contents`, one after another; errors are numbers."""

    def __init__(self, browser: Browser, name: str, contents: list[Any]) -> None:
        self.requests: list[Any] = []
        self.contents = contents
        self.page: Page = browser.new_page()
        self._html = (Path(server.__file__).parent / name / "index.html").read_text(encoding="utf-8")
        self.page.route("**/*", self._answer)
        self.page.goto("http://tinylm.test/")

    def _answer(self, route: Route) -> None:
        if route.request.method == "GET":
            route.fulfill(body=self._html, content_type="text/html")
            return
        self.requests.append(json.loads(route.request.post_data or ""))
        content = self.contents.pop(0)
        if isinstance(content, int):
            route.fulfill(status=content, body=json.dumps({"error": {"message": f"Error {HOSTILE}"}}))
            return
        choices = [{"text": piece, "delta": {"content": piece}} for piece in content]
        events = [json.dumps({"choices": [choice]}) for choice in choices] + ["[DONE]"]
        route.fulfill(body="".join(f"data: {event}\n\n" for event in events), content_type="text/event-stream")


def test_the_chat_page_sends_the_whole_conversation_and_shows_answers_as_text(browser: Browser) -> None:
    answers = Answers(browser, "chat_page", [["Hello ", HOSTILE], 400, ["Bye"], ["New"]])
    page, text = answers.page, answers.page.locator("#text")
    text.fill("One?")
    text.press("Enter")
    expect(page.locator(".assistant")).to_have_text(f"Hello {HOSTILE}")
    assert page.locator("img").count() == 0
    text.fill("Two?")
    text.press("Enter")
    expect(page.locator("#error")).to_have_text(f"Error {HOSTILE}")
    expect(text).to_have_value("Two?")  # to be sent again
    assert page.locator(".user").count() == 1
    page.locator("#go").click()
    expect(page.locator(".assistant").last).to_have_text("Bye")
    expected = ["One?", f"Hello {HOSTILE}", "Two?"]
    assert [message["content"] for message in answers.requests[2]["messages"]] == expected
    assert [message["role"] for message in answers.requests[2]["messages"]] == ["user", "assistant", "user"]
    page.locator("#new").click()
    text.fill("Three?")
    text.press("Enter")
    expect(page.locator(".assistant")).to_have_text("New")
    assert [message["content"] for message in answers.requests[3]["messages"]] == ["Three?"]
    page.close()


def test_the_page_of_a_base_model_continues_the_text(browser: Browser) -> None:
    answers = Answers(browser, "completion_page", [[" sea", " was"], 400])
    answers.page.locator("#text").fill("The")
    answers.page.locator("#go").click()
    expect(answers.page.locator("#text")).to_have_value("The sea was")
    answers.page.locator("#go").click()
    expect(answers.page.locator("#error")).to_have_text(f"Error {HOSTILE}")
    assert [request["prompt"] for request in answers.requests] == ["The", "The sea was"]
    answers.page.close()
