"""Draw ``docs/inspector-*.png``: the inspector's page in headless Chromium, with a chat model served here.

    python tools/screenshots.py [--target smollm2-135m-instruct] [--out docs]

Needs playwright, and Chromium on the path.
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright

import draftwing as dw
from draftwing.serve.app import Settings, make_app

COLOURS = 128  # few enough for small files, enough for text
PROMPT = "Write a Python function that checks whether a number is prime."


@contextmanager
def served(target: str) -> Iterator[str]:
    """Start a server in a thread; yield its address."""
    app = make_app(dw.load(target), Settings(names=(target,)))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def keep(page: Page, file: Path, height: int) -> None:
    """Save the top of a page with few colours."""
    page.wait_for_timeout(400)
    width = page.viewport_size["width"] if page.viewport_size else 0
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))).convert("RGB")  # type: ignore[arg-type]
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1024:.0f} KB")


def write(page: Page, address: str, view: str, **settings: str) -> None:
    """Open a view and enter the prompt."""
    page.set_default_timeout(120_000)
    page.goto(f"{address}/#{view}")
    page.get_by_role("combobox", name="Tree").select_option(settings.pop("tree", "auto"))
    for name, value in settings.items():
        page.get_by_role("spinbutton", name=name).fill(value)
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    args = parser.parse_args()
    with served(args.target) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        wide = {"width": 1280, "height": 860}
        page = browser.new_page(viewport=wide, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type]
        write(page, address, "chat", tree="dynamic:12,4,3", Temperature="0.7")
        page.locator(".facts").first.wait_for()
        keep(page, args.out / "inspector-write.png", 900)
        page = browser.new_page(viewport=wide, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type]
        write(page, address, "compare", Tokens="96")
        page.locator(".verdict.same").wait_for()
        keep(page, args.out / "inspector-compare.png", 980)
        page = browser.new_page(viewport=wide, color_scheme="dark", reduced_motion="reduce")  # type: ignore[arg-type]
        write(page, address, "lesson", tree="dynamic:12,4,3", Temperature="0.7")
        page.locator(".tries").first.wait_for()
        page.evaluate("document.querySelector('.bar-card').style.position = 'static'")
        page.evaluate("document.querySelector('.ask').hidden = true; document.querySelector('.panel').open = false")
        keep(page, args.out / "inspector-lesson.png", 1500)
        phone = {"width": 390, "height": 844}
        page = browser.new_page(viewport=phone, color_scheme="light", device_scale_factor=2)  # type: ignore[arg-type]
        page.set_default_timeout(120_000)
        page.goto(address)
        page.locator(".example").first.click()
        page.locator(".facts").first.wait_for()
        keep(page, args.out / "inspector-phone.png", 844)
        browser.close()


if __name__ == "__main__":
    main()
