"""Pictures of every page: wide and narrow, light and dark, with no data, a little and a lot.

    python -m tests.web.screenshots FOLDER

With ``--readme``, the picture of the README alone, over a loop that delivers.
"""

import argparse
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.commands import ROOT, Command
from tests.servers import RealServer, real_server
from tests.web import scenery
from tests.web.browsing import DESKTOP, PHONE, Visitor, launched, wait_for_looks
from tests.web.running import Api, running, settings_of

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
LIVELY_LOOKS = 14  # one a second, so that rates are those of some seconds
TALLEST = 2_400  # pixels of a picture; a page may go on
SIZES = {"wide": DESKTOP, "phone": PHONE}
THEMES = ("light", "dark")


def paths_of(api: Api) -> dict[str, str]:
    """Return an address of each page, by a name for its picture."""
    found = {
        "overview": "/", "messages": "/messages", "topics": "/topics", "dead": "/dead", "loops": "/loops", "try": "/try",
        "unknown": "/messages/nobody", "cancel": "/change/messages?verb=cancel", "purge": "/change/dead?verb=purge",
    }  # fmt: skip
    topics = [each["name"] for each in api.get("/v1/topics").json()["topics"]]
    if topics:
        found["week"] = "/?hours=168"
        found["topic"] = f"/topics/{'invoices' if 'invoices' in topics else topics[0]}"
    for each in api.get("/v1/messages?limit=1&topic=invoices").json()["messages"]:
        found["message"] = f"/messages/{each['id']}"
    for each in api.get("/v1/dead?limit=1").json()["letters"]:
        found["letter"] = f"/letter?name={each['name'].replace('/', '%2F')}"
    return found


def take_all(folder: Path) -> None:
    """Write all pictures into a folder."""
    fills = {"none": lambda server, api: None, "little": scenery.have_little, "lot": scenery.have_a_lot}
    with launched() as browser:
        for amount, fill in fills.items():
            with real_server() as server, running(settings_of(server.url)) as api:
                fill(server, api)
                for size_name, size in SIZES.items():
                    for theme in THEMES:
                        visitor = Visitor(browser, f"http://127.0.0.1:{api.port}", size, theme)
                        for name, path in paths_of(api).items():
                            page = visitor.open(path)
                            if page.locator("body[data-live]").count():
                                wait_for_looks(page, 2)
                            tall = page.evaluate("() => document.documentElement.scrollHeight")
                            clip: Any = {"x": 0, "y": 0, "width": size[0], "height": min(tall, TALLEST)}
                            path_there = folder / f"{name}-{amount}-{size_name}-{theme}.png"
                            page.screenshot(path=path_there, full_page=True, clip=clip)
                        visitor.context.close()


@contextmanager
def delivering(server: RealServer, api: Api) -> Iterator[None]:
    """A loop that delivers what is scheduled all the time, some 40 messages a second."""
    flags = ["--redis", server.url, "--sink", "stream"]
    loop = Command([sys.executable, "-P", "jobs/drain.py", *flags], {"PYTHONPATH": str(ROOT)}, ROOT)
    over = threading.Event()

    def schedule() -> None:
        draw = random.Random(7)
        while not over.wait(0.5):
            topics = draw.choices([*scenery.TEXTS], [5, 3, 2, 2], k=20)
            api.batch([{"message": scenery.TEXTS[t], "topic": t, "delay_sec": 1 + draw.random()} for t in topics])

    thread = threading.Thread(target=schedule)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        loop.stop()


def take_readme() -> None:
    """Write the picture of the README."""
    with real_server() as server, running(settings_of(server.url)) as api, launched() as browser:
        scenery.have_little(server, api)
        visitor = Visitor(browser, f"http://127.0.0.1:{api.port}", DESKTOP)
        with delivering(server, api):
            page = visitor.open("/")
            wait_for_looks(page, LIVELY_LOOKS, timeout_ms=60_000)
            PICTURE.parent.mkdir(exist_ok=True)
            end = page.locator(".columns").bounding_box()
            assert end is not None
            clip: Any = {"x": 0, "y": 0, "width": DESKTOP[0], "height": end["y"] + end["height"]}
            page.screenshot(path=PICTURE, full_page=True, clip=clip)
        visitor.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--readme", action="store_true", help=f"write {PICTURE.relative_to(ROOT)} instead")
    given = parser.parse_args()
    if given.readme:
        take_readme()
    elif given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
        take_all(given.folder)
    else:
        parser.error("name a folder, or --readme")


if __name__ == "__main__":
    main()
