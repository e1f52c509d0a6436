"""The views Engine and Requests, and what all views promise: no errors, nothing foreign, good to everyone."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from visitor import Start, Visitor

VIEWS = ("chat", "engine", "requests")
SERIOUS = ("serious", "critical")


def test_engine_shows_its_figures_and_why_it_runs_so(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start(), "engine")
    expect(page.locator(".tile dd").nth(1)).to_have_text("0")
    expect(page.locator(".chart canvas")).to_have_count(8)
    expect(page.locator(".facts h2").first).to_have_text("What it runs with, and why")
    visitor.page.evaluate("location.hash = '#chat'")
    visitor.ask("@flow 20 5000")
    expect(page.locator(".message.assistant h2").first).to_be_visible()
    page.evaluate("location.hash = '#engine'")
    expect(page.locator(".tile dd").nth(1)).to_have_text("1")
    assert visitor.complaints == []
    assert visitor.strayed == []


def test_several_engines_are_added_up_chosen_and_named(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start(replicas=2))
    visitor.ask("@flow 20 5000")
    expect(page.locator(".message.assistant h2").first).to_be_visible()
    page.evaluate("location.hash = '#engine'")
    rows = page.locator(".engines tbody tr")
    expect(rows).to_have_count(2)
    running = page.locator(".engines tr td:nth-child(5)")
    expect(running.nth(2)).to_have_text("1")
    assert sorted(running.all_inner_texts()[:2]) == ["0", "1"]
    busy = 0 if running.nth(0).inner_text() == "1" else 1
    for engine, number in ((busy, "1"), (1 - busy, "0")):
        button = page.get_by_role("button", name=f"Engine {engine}")
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".tile dd").nth(1)).to_have_text(number)
        expect(button).to_be_focused()
    page.evaluate("location.hash = '#requests'")
    row = page.locator(".requests tbody tr").first
    expect(row.locator("td").nth(2)).to_have_text(str(busy))
    row.click()
    expect(page.locator(".details")).to_contain_text(f"engine {busy}, priority 0")
    page.get_by_role("button", name="Abort this request").click()
    expect(page.locator(".requests tbody tr")).to_have_count(0)
    assert visitor.complaints == []


def test_one_engine_has_no_list_of_engines(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start(), "engine")
    expect(page.locator(".tile dd").nth(1)).to_have_text("0")
    expect(page.locator(".engines")).to_be_hidden()
    page.evaluate("location.hash = '#requests'")
    expect(page.locator(".requests th", has_text="State")).to_be_visible()
    expect(page.locator(".requests th", has_text="Engine")).to_be_hidden()


def test_a_request_is_explained_and_aborted(start: Start, visitor: Visitor) -> None:
    server = start()
    page = visitor.open(server)
    visitor.ask("@flow 20 5000")
    expect(page.locator(".message.assistant h2").first).to_be_visible()
    page.evaluate("location.hash = '#requests'")
    row = page.locator(".requests tbody tr").first
    expect(row).to_contain_text("decoding")
    row.click()
    expect(page.locator(".details .why")).to_contain_text("for a row")
    expect(page.locator(".details .knobs").first).to_contain_text("--max-running-requests")
    expect(page.locator(".details")).not_to_contain_text(re.compile("null|undefined|false"))
    expect(page.locator(".moments")).to_contain_text("90 ms")
    page.get_by_role("button", name="Abort this request").click()
    expect(page.locator(".requests tbody tr")).to_have_count(0)
    page.evaluate("location.hash = '#chat'")
    expect(page.locator(".message.assistant .problem, .message.assistant .stats").first).to_be_visible()
    assert server.report()["aborted"] == 1


def test_a_filter_shows_what_it_says(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    visitor.ask("@flow 20 5000")
    expect(page.locator(".message.assistant h2").first).to_be_visible()
    page.evaluate("location.hash = '#requests'")
    expect(page.locator(".requests tbody tr")).to_have_count(1)
    page.get_by_role("button", name="waiting").click()
    expect(page.locator(".requests tbody tr")).to_have_count(0)
    page.get_by_role("button", name="open", exact=True).click()
    expect(page.locator(".requests tbody tr")).to_have_count(1)


def test_views_of_a_server_with_an_admin_key_say_which_key_they_need(start: Start, visitor: Visitor) -> None:
    server = start(api_key=("user",), admin_key=("boss",))
    page = visitor.open(server, "requests")
    page.fill("#key", "user")
    page.keyboard.press("Enter")
    expect(page.locator("#requests .problem").first).to_contain_text("admin key")
    page.get_by_role("button", name="Use another key").first.click()
    page.fill("#key", "boss")
    page.keyboard.press("Enter")
    expect(page.locator("#requests .problem").first).to_be_hidden()


def test_all_is_reached_by_keyboard(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    expect(page.locator("#composer")).to_be_focused()
    page.keyboard.type("@say typed")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .markdown")).to_have_text("typed")
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
            )
        )
    wanted = {"Chat", "Engine", "Requests", "New conversation", "Answer again", "Edit and send again", "Send"}
    assert wanted <= reached, wanted - reached


def serious_problems(page: Page) -> list[list[str]]:
    """What axe finds: the rule, and the first elements that break it."""
    found = Axe().run(page).response["violations"]
    return [
        [page.url, one["id"], *(node["html"][:120] for node in one["nodes"][:3])]
        for one in found
        if one["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_serious(start: Start, browser: Browser, scheme: str, width: int) -> None:
    server = start()
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    visitor = Visitor(context)
    page = visitor.open(server)
    visitor.answer("@flow 3000 300")
    found = []
    for view in VIEWS:
        page.evaluate(f"location.hash = '#{view}'")
        expect(page.locator(f"#{view}")).to_be_visible()
        if view == "engine":
            expect(page.locator(".facts h2").first).to_be_visible()
        found += serious_problems(page)
    page.evaluate("location.hash = '#chat'")
    page.get_by_label("Settings of this conversation").click()
    found += serious_problems(page)
    context.close()
    assert found == [], json.dumps(found, indent=1)


def test_a_phone_shows_all_views_without_scrolling_sideways(start: Start, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    visitor = Visitor(context)
    page = visitor.open(start())
    visitor.answer("@flow 3000 300")
    for view in VIEWS:
        page.evaluate(f"location.hash = '#{view}'")
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, view
    page.evaluate("location.hash = '#chat'")
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.get_by_role("button", name="New conversation")).to_be_visible()
    context.close()


def test_the_page_needs_no_key_and_has_a_strict_policy(start: Start) -> None:
    server = start(api_key=("secret",))
    with urllib.request.urlopen(server.url("/")) as answer:
        policy = answer.headers["Content-Security-Policy"]
        tag = answer.headers["ETag"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    again = urllib.request.Request(server.url("/"), headers={"If-None-Match": tag})
    with pytest.raises(urllib.error.HTTPError) as unchanged:
        urllib.request.urlopen(again)
    assert unchanged.value.code == 304
    assert server.call("/web/none.js")[0] == 404
    assert server.call("/v1/models")[0] == 401


def test_every_vendored_library_has_its_licence() -> None:
    folder = Path(__file__).parents[2] / "minisgl" / "server" / "web" / "vendor"
    licences = (folder / "LICENSES.md").read_text()
    for file in folder.glob("*.js"):
        assert f"## {file.stem}" in licences.lower().replace("highlightjs-cdn-assets", "highlight"), file.name
