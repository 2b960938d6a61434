"""The console in Chromium, on a service without a key."""

import pytest
from playwright.sync_api import expect

from tests.support.browser import CHROMIUM, chromium, visiting
from tests.support.running import Running

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
    pytest.mark.timeout(600),
]


def test_a_service_without_a_key_generates_and_is_not_changed(service: Running) -> None:
    with chromium() as browser, visiting(browser, f"{service.url}/console") as visit:
        visit.until_status("ready")
        visit.send("hello", max_tokens="8")
        visit.until_ended()
        assert visit.tokens() > 0
        assert visit.complaints == []
        visit.page.get_by_role("link", name="Operations").click()
        visit.page.get_by_role("button", name="Drain").click()
        visit.page.locator("#confirm-yes").click()
        alert = visit.page.locator("#operations-error")
        expect(alert).to_contain_text("this service has no API key")
        expect(alert.locator("code")).to_have_text("HTTP 403 · key_required")
