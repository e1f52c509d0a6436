"""The view Chat, driven as a user would."""

import json
from pathlib import Path

from playwright.sync_api import expect
from visitor import Start, Visitor

HOSTILE = (
    "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'> "
    "![seen](https://elsewhere.example/pixel.png) [go](javascript:window.hacked=1) "
    "[data](data:text/html,<script>1</script>) <https://fine.example/> "
    "<iframe src='https://elsewhere.example/'></iframe> <style>body{display:none}</style>"
)


def test_an_answer_is_shown_as_markdown_with_its_figures(start: Start, visitor: Visitor) -> None:
    visitor.open(start())
    article = visitor.answer("@flow 500 400")
    expect(article.locator("h2").first).to_have_text("A heading")
    expect(article.locator("li").first).to_have_text("one thing")
    expect(article.locator(".code code").first).to_contain_text("def add(one: int, other: int)")
    expect(article.locator(".code .hljs-keyword").first).to_have_text("def")
    expect(article.locator("td.to-right").first).to_have_text("1")
    expect(article.locator(".stats")).to_contain_text("first token after")
    expect(article.locator(".stats")).to_contain_text("tokens/s")
    expect(article.locator(".stats")).to_contain_text("401 tokens")
    assert visitor.complaints == []
    assert visitor.strayed == []


def test_what_was_shown_while_it_grew_is_what_the_whole_text_gives(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    same = page.evaluate(
        """async () => {
            const { GrowingMarkdown } = await import("/web/chat/markdown.js");
            const text = [
                "# One", "", "a *b*", "c", "", "- x", "- y", "", "  still y", "", "1. n", "   - m", "",
                "```py", "a = 1", "", "b = '```'", "```", "~~~", "open", "", "~~~", "",
                "| a | b |", "|---|--:|", "| 1 | 2 |", "", "> q", "> r", "", "para", "===", "",
                "    code", "", "<b>raw</b>", "", "end",
            ].join("\\n");
            const differing = [];
            for (let step = 1; step < 9; step++) {
                const grown = new GrowingMarkdown();
                for (let end = 1; end < text.length + step; end += step) grown.show(text.slice(0, end));
                grown.finish(text);
                const whole = new GrowingMarkdown();
                whole.finish(text);
                if (grown.element.innerHTML !== whole.element.innerHTML) differing.push(step);
            }
            return differing;
        }"""
    )
    assert same == []


def test_stop_ends_the_answer_within_200_ms_and_frees_the_engine(start: Start, visitor: Visitor) -> None:
    server = start()
    page = visitor.open(server)
    visitor.ask("@flow 50 5000")
    expect(page.locator(".message.assistant h2").first).to_be_visible()
    took = page.evaluate(
        """() => new Promise((resolve) => {
            const began = performance.now();
            const log = document.querySelector(".log");
            new MutationObserver(() => resolve(performance.now() - began)).observe(log, {
                attributes: true, attributeFilter: ["aria-busy"] });
            document.querySelector(".send[aria-label=Stop]").click();
        })"""
    )
    assert took < 200
    expect(page.locator(".stats")).to_contain_text("stopped")
    assert server.report()["aborted"] == 1


def test_escape_stops_too(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    visitor.ask("@flow 50 5000")
    expect(page.locator(".message.assistant h2").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".stats")).to_contain_text("stopped")


def test_another_answer_and_an_edited_question_are_branches_and_nothing_is_lost(
    start: Start, visitor: Visitor
) -> None:
    page = visitor.open(start())
    visitor.answer("@say first")
    visitor.answer("@say second")
    page.locator(".message.assistant").nth(1).get_by_label("Answer again").click()
    expect(page.locator(".message.assistant").nth(1).locator(".branches")).to_contain_text("2 / 2")
    page.locator(".message.user").nth(0).get_by_label("Edit and send again").click()
    expect(page.locator("#composer")).to_have_value("@say first")
    visitor.page.fill("#composer", "@say changed")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_have_count(1)
    expect(page.locator(".message.assistant .markdown")).to_have_text("changed")
    page.locator(".message.user").get_by_label("The version before").click()
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.locator(".message.assistant").nth(1).locator(".branches")).to_contain_text("2 / 2")
    page.reload()
    expect(page.locator(".message.assistant .markdown").nth(1)).to_have_text("second")


def test_settings_reach_the_engine(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Top p").fill("0.5")
    page.get_by_label("Top k").fill("7")
    page.get_by_label("Seed").fill("42")
    page.get_by_label("Most tokens").fill("3")
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_role("button", name="Save").click()
    article = visitor.answer("@say many words that are cut")
    expect(article.locator(".stats")).to_contain_text("cut at the limit")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or ""))
    visitor.answer("@say x")
    body = next(json.loads(text) for text in sent if "messages" in text)
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    figures = [body[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")]
    assert figures == [0.25, 0.5, 7, 42, 3]


def test_a_schema_that_is_no_json_is_not_saved(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    page.get_by_label("Settings of this conversation").click()
    page.get_by_label("JSON schema").fill("{")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("The JSON schema is not JSON.")).to_be_visible()
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    page.get_by_role("button", name="Save").click()
    expect(page.locator("dialog.settings")).to_have_count(0)


def test_thoughts_are_folded_and_calls_framed_and_answered(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    page.get_by_label("Settings of this conversation").click()
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    page.get_by_label("Tools").fill(json.dumps([tool]))
    page.get_by_role("button", name="Save").click()
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    article = visitor.answer(f"@say <think>\nhm\n</think>\n\nLet me see.\n{call}")
    expect(article.locator(".thought summary")).to_contain_text("Thought")
    expect(article.locator(".thought .markdown")).to_be_hidden()
    article.locator(".thought summary").click()
    expect(article.locator(".thought .markdown")).to_have_text("hm")
    expect(article.locator(".call figcaption")).to_have_text("get_time")
    page.get_by_label("Result of get_time").fill("noon @say It is noon.")
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator(".message.assistant").nth(1)).to_contain_text("It is noon.")


def test_conversations_are_exported_imported_and_deleted(
    start: Start, visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.open(start())
    visitor.answer("@say one to keep")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator(".conversations .icon").first.click()
    expect(page.locator(".conversations li")).to_have_count(0)
    page.set_input_files("input[type=file]", file)
    expect(page.locator(".conversations li")).to_have_count(1)
    expect(page.locator(".message.assistant .markdown")).to_have_text("one to keep")
    (tmp_path / "bad.json").write_text("[]")
    page.set_input_files("input[type=file]", tmp_path / "bad.json")
    expect(page.locator(".notice")).to_contain_text("holds no conversations of minisgl")


def test_a_key_is_asked_for_once_and_again_when_it_expires(start: Start, visitor: Visitor) -> None:
    server = start(api_key=("secret",))
    page = visitor.open(server)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-title")).to_have_text("The server refused the key")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    visitor.answer("@say yes")
    page.reload()
    visitor.answer("@say still")
    expect(page.locator("#key-dialog")).to_be_hidden()
    server.__exit__()
    start(api_key=("other",), port=server.port)
    expect(page.locator("#state")).to_have_attribute("data-kind", "ready")
    visitor.ask("@say again")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "other")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant").last.locator(".markdown")).to_have_text("again")


def test_a_server_that_dies_and_comes_back(start: Start, visitor: Visitor) -> None:
    server = start()
    page = visitor.open(server)
    visitor.ask("@flow 50 5000")
    expect(page.locator(".message.assistant li").first).to_be_visible()
    server.__exit__()
    expect(page.locator(".message.assistant .problem")).to_be_visible()
    expect(page.locator("#state")).to_have_attribute("data-kind", "away")
    expect(page.locator(".message.assistant li").first).to_be_visible()
    start(port=server.port)
    expect(page.locator("#state")).to_have_attribute("data-kind", "ready")
    page.get_by_label("Answer again").click()
    expect(page.locator(".branches")).to_contain_text("2 / 2")


def test_hostile_markdown_runs_nothing_and_fetches_nothing(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    article = visitor.answer(f"@say {HOSTILE}")
    assert page.evaluate("window.hacked") is None
    assert visitor.strayed == []
    assert article.locator(".markdown img, .markdown script, .markdown iframe, .markdown style").count() == 0
    links = article.locator(".markdown a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert all(link.startswith("https://") for link in links)
    assert links[:2] == ["https://elsewhere.example/pixel.png", "https://fine.example/"]
    expect(page.locator("body")).to_be_visible()


def test_a_stream_of_200_tokens_a_second_drops_no_frame_for_100_ms(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    page.evaluate(
        """() => {
            window.longest = 0;
            let last = performance.now();
            const frame = (now) => {
                window.longest = Math.max(window.longest, now - last);
                last = now;
                requestAnimationFrame(frame);
            };
            requestAnimationFrame((now) => { last = now; frame(now); });
        }"""
    )
    article = visitor.answer("@flow 200 2000")
    expect(article.locator(".stats")).to_contain_text("2\u202f001 tokens")
    assert page.evaluate("window.longest") < 100


def test_an_answer_of_10000_tokens(start: Start, visitor: Visitor) -> None:
    page = visitor.open(start())
    article = visitor.answer("@flow 100000 10000")
    expect(article.locator(".stats")).to_contain_text("10\u202f001 tokens")
    assert page.locator(".message.assistant h2").count() > 20
    assert visitor.complaints == []
