"""The console in a real browser: the system's Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

CHROMIUM = shutil.which("chromium")
ANSWER_MS = 120_000
"""A busy machine takes its time."""


@dataclass(kw_only=True)
class Visit:
    """One tab with the console, and what it asked for and complained about."""

    page: Page
    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def ask(self, request: Request) -> None:
        self.requests.append(request)

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def bodies(self) -> list[Any]:
        """Returns the bodies of all requests so far that had one."""
        return [r.post_data_json for r in self.requests if r.post_data is not None]

    def use_key(self, key: str) -> None:
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_label("API key").press("Enter")

    def until_status(self, status: str) -> None:
        self.page.locator(f"#health[data-status={status}]").wait_for()

    def send(self, prompt: str, **fields: str) -> None:
        """Sends a prompt by the keyboard; `fields` are inputs and selects by name."""
        self.set(**fields)
        self.page.get_by_label("Prompt").fill(prompt)
        self.page.get_by_label("Prompt").press("Control+Enter")

    def set(self, **fields: str) -> None:
        closed = self.page.locator("#settings:not([open]) summary")
        if fields and closed.count():  # on a phone
            closed.click()
        for name, value in fields.items():
            control = self.page.locator(f"#composer [name={name}]")
            if control.first.get_attribute("type") == "radio":
                self.page.locator(f"#composer [name={name}][value='{value}']").check(force=True)
            elif control.evaluate("element => element.localName") == "select":
                control.select_option(value)
            else:
                control.fill(value)

    def until_ended(self) -> None:
        """Until no request of the playground runs."""
        self.page.locator("#send:enabled").wait_for()

    def tokens(self, origin: str = "") -> int:
        within = f".{origin}" if origin else ""
        return self.page.locator(f"#transcript .token{within}").count()

    def text(self) -> str:
        """Returns the last answer."""
        return self.page.locator("#transcript .answer").last.text_content() or ""

    def error(self) -> str:
        self.page.locator("#error .error").wait_for()
        return self.page.locator("#error strong").text_content() or ""


@contextmanager
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=ANSWER_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(browser: Browser, url: str, **context: Any) -> Iterator[Visit]:
    """Opens an address in a context of its own. At the end, no request has left its origin."""
    with browser.new_context(**context) as session:
        session.set_default_timeout(ANSWER_MS)
        visit = Visit(page=session.new_page())
        visit.page.on("request", visit.ask)
        visit.page.on("console", visit.note)
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.on("dialog", lambda dialog: visit.complaints.append(dialog.message))
        visit.page.goto(url)
        yield visit
        origin = urlsplit(url)[:2]
        outside = [r.url for r in visit.requests if urlsplit(r.url)[:2] != origin]
        assert outside == []
