"""Takes the pictures of docs/console.md from a service that runs.

python -m tests.support.console_pictures http://127.0.0.1:8000 docs/pictures [KEY]
"""

import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.support.browser import Visit, chromium, visiting

WIDE = {"width": 1440, "height": 900}
MAX_BYTES = 200_000


def main(url: str, folder: str, key: str = "") -> None:
    with chromium() as browser:
        for name, options in (
            ("console-light", {"viewport": WIDE, "color_scheme": "light"}),
            ("console-dark", {"viewport": WIDE, "color_scheme": "dark"}),
            ("console-phone", {"viewport": {"width": 390, "height": 844}, "is_mobile": True}),
        ):
            file = Path(folder) / f"{name}.png"
            _take(browser, url, file, key=key, options=options)
            assert file.stat().st_size < MAX_BYTES, file


def _take(browser: Browser, url: str, file: Path, *, key: str, options: dict[str, Any]) -> None:
    with visiting(browser, f"{url}/console", **options) as visit:
        visit.use_key(key)
        visit.until_status("ready")
        if file.stem == "console-dark":
            visit.page.get_by_role("link", name="Operations").click()
            visit.page.get_by_text("Acceptance by position").first.wait_for()
        else:
            _answer(visit, compares=file.stem == "console-light")
            if file.stem == "console-phone":
                visit.page.locator("#output").evaluate("element => element.scrollIntoView()")
        visit.page.screenshot(path=file)


def _answer(visit: Visit, *, compares: bool) -> None:
    prompt = "Tom has 3 bags with 12 apples each and gives 5 apples away. How many are left?"
    visit.set(seed="11", temperature="0.6")
    visit.page.get_by_label("Prompt").fill(prompt)
    visit.page.get_by_role("button", name="Compare" if compares else "Send").click()
    visit.until_ended()
    visit.page.wait_for_timeout(300)


if __name__ == "__main__":
    main(*sys.argv[1:])
