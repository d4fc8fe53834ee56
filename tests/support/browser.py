"""A headless Chromium, driven by Playwright: the system's, or the one that `playwright install chromium` has fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; skips the test where there is none."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = next((found for name in NAMES if (found := shutil.which(name))), own if Path(own).exists() else None)
        if path is None:
            pytest.skip(f"needs one of {', '.join(NAMES)}: apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # which root has none of
        yield browser
        browser.close()
