"""Takes the pictures of the docs: the three views with the built-in model, light and dark, wide and phone.

make test-browser          writes docs/images
"""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from served_model import Served
from visitor import Visitor

SIZES = {"wide": (1280, 860), "phone": (390, 844)}
NUM_REQUESTS = 10
QUESTION = "What is the capital of Japan?"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--max-running-requests", "4", "--dtype", "float32") as one:
        put_load(one.url)
        yield one


def put_load(url: str) -> None:
    def ask(number: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f"Tell me about number {number}. " * (1 + number % 5)}],
            "max_tokens": 8 + 3 * number, "temperature": 1.0, "seed": number,
        }  # fmt: skip
        urllib.request.urlopen(f"{url}/v1/chat/completions", json.dumps(body).encode(), timeout=250).read()

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        list(pool.map(ask, range(NUM_REQUESTS)))


@pytest.fixture(scope="module")
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--pictures")
    folder = Path(given) if given else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pictures_of_all_views(
    served: Served, browser: Browser, pictures: Path, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        device_scale_factor=1.5,
    )
    visitor = Visitor(context)
    visitor.home = served.url
    page = visitor.page
    page.goto(f"{served.url}/#chat")
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("60")
    page.get_by_label("Log probabilities").check()
    page.get_by_role("button", name="Save").click()
    article = visitor.answer(QUESTION)
    expect(article.locator(".markdown")).to_contain_text("Tokyo")
    article.get_by_label("Show how likely each token was").click()
    expect(article.locator(".tokens")).to_contain_text("Tokyo")
    article.locator(".tokens span").nth(3).hover()
    expect(article.locator(".alternatives td").first).to_contain_text("%")
    page.screenshot(path=pictures / f"chat-{size}-{scheme}.png")
    page.evaluate("location.hash = '#engine'")
    expect(page.locator(".chart canvas")).to_have_count(8)
    expect(page.locator(".facts tr").first).to_be_visible()
    page.screenshot(path=pictures / f"engine-{size}-{scheme}.png")
    page.evaluate("location.hash = '#requests'")
    page.locator(".requests tbody tr").nth(2).click()
    expect(page.locator(".details .why")).to_be_visible()
    page.screenshot(path=pictures / f"requests-{size}-{scheme}.png")
    assert visitor.complaints == []
    assert visitor.strayed == []
    context.close()
