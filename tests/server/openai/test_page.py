"""The page that shows what was read: how it finds passages, in Node.js, and all of it in Chromium over real engines."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import playwright
import pytest
import requests
from playwright.sync_api import Browser, Locator, Page, expect
from tests.conftest import BuildEngine, RandomModel
from tests.support.browser import chromium
from tests.support.door_processes import Door, doors, engine_process, write_keys
from tests.support.waiting import SECONDS

from kvseek.engine.tokenizer import Tokenizer
from kvseek.server.openai.app import FOLDER
from kvseek.server.settings import ServeSettings

WINDOW = ("--cache.sink", "4", "--cache.local", "16", "--cache.update", "8", "--cache.full_threshold", "32")
NODE = Path(playwright.__file__).parent / "driver/node"  # the wheel's own
DOCUMENT = "the harbour master wrote the log, naïve 🚢 café 日本語 <b>one</b> ship " * 8
QUESTION = "two ships?"
KEY = "the-key-of-the-other-server"
TOKENS, BLOCK, SINK = 6, 16, 4
Shares = list[float]
expect.set_options(timeout=SECONDS * 1000)


@pytest.fixture(scope="module")
def directories(random_model: RandomModel, build_engine: BuildEngine) -> Callable[[str], Path]:
    def build(method: str) -> Path:
        return build_engine(random_model("llama"), method, *WINDOW, f"--{method}.top_k", "12")

    return build


def in_node(script: str, *values: Any) -> Any:
    """What a function of the page's module gives."""
    page = json.dumps((FOLDER / "page.js").as_uri())
    code = f"const page = await import({page}); console.log(JSON.stringify(({script})(...{json.dumps(values)})))"
    command = [str(NODE), "--input-type=module", "--eval", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    return json.loads(done.stdout)


def passages(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each block of tokens. A character whose bytes two blocks have is in the second one."""
    ends = [*range(BLOCK, len(ids), BLOCK), len(ids)]
    before = ["", *(tokenizer.decode_complete(ids[:end])[0] for end in ends)]
    return [after[len(own) :] for own, after in pairwise(before)]


def test_passages_are_the_text_of_their_tokens(directories: Callable[[str], Path]) -> None:
    """Also beyond the characters of which JavaScript's strings have two units, and where a border cuts one."""
    tokenizer = Tokenizer(directories("nested"))
    ids = [0, *tokenizer.encode("🚢" * 20 + DOCUMENT, add_special_tokens=False)]
    prompt = {"text": tokenizer.decode(ids), "offsets": tokenizer.offsets(ids)}
    script = """(prompt, answer, block) => {
        const context = new page.Context(prompt);
        answer.forEach((text) => context.add(text));
        const starts = [...Array(Math.ceil(context.tokens / block)).keys()];
        return starts.map((b) => context.slice(b * block, (b + 1) * block));
    }"""
    expected = passages(tokenizer, ids)
    assert in_node(script, prompt, [], BLOCK) == expected
    answer = ["🚢", "", "x"] * 6
    longer = in_node(script, prompt, answer, BLOCK)
    assert "".join(longer) == prompt["text"] + "".join(answer)
    assert longer[: len(expected) - 1] == expected[:-1]


def test_shares_are_of_the_rows_that_can_be_selected() -> None:
    rows = {
        "region": [4, 40],
        "block": 16,
        "layers": [0, 2, 5],
        "kv_heads": [1, 3],
        "blocks": [[[0], [0, 2]], None, [[], [1]]],
        "counts": [[[6], [3, 8]], None, [[], [16]]],
    }
    script = """(rows, ask) => ask.map(([layer, head]) => {
        const {sums, dense} = page.shares(rows, layer, head, 4);
        return [...sums, dense];
    })"""
    asked = [(0, 1), (0, "all"), ("all", "all"), (2, 1), (5, 3)]
    assert in_node(script, rows, asked) == [
        [0.5, 0, 0, 0, False],
        [0.375, 0, 0.5, 0, False],
        [0.1875, 0.25, 0.25, 0, False],  # the dense layer selects nothing
        [1, 1, 1, 0, True],
        [0, 1, 0, 0, False],
    ]
    both = "(rows) => [...page.mean([[0, 1], [5, 3]].map((one) => page.shares(rows, ...one, 4)), 4).sums]"
    assert in_node(both, rows) == [0.25, 0.5, 0, 0]


@pytest.mark.parametrize("url", ["http://a:9", " http://a:9/ ", "http://a:9/v1", "http://a:9/v1/"])
def test_a_server_is_named_by_its_root_or_by_its_base_url(url: str) -> None:
    assert in_node("(url) => page.rootOf(url)", url) == "http://a:9"


@dataclass
class Ports:
    """Two ports: one that serves the page, and one of another method that it may ask, with a key."""

    own: Door
    other: Door
    tokenizer: Tokenizer

    def shares(self, port: Door, layer: int, head: int, step: int) -> tuple[list[str], Shares]:
        """The passages of the prompt and what a step reads of them, from an answer without a page."""
        key = {"Authorization": f"Bearer {KEY}"}
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{DOCUMENT.strip()}\n\n{QUESTION}"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_selected_rows": {"block": 1},
        }
        response = requests.post(f"{port.openai_url}/chat/completions", json=body, headers=key, timeout=SECONDS)
        rows = response.json()["choices"][0]["selected_rows"][step]
        text = self.tokenizer.apply_chat_template(body["messages"])  # type: ignore[arg-type]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        read = [0] * -(-len(ids) // BLOCK)
        for place in rows["blocks"][layer][head]:
            read[place // BLOCK] += 1
        sizes = [sum(SINK <= b * BLOCK + i < rows["region"][1] for i in range(BLOCK)) for b in range(len(read))]
        return passages(self.tokenizer, ids), [
            count / size if size else 0.0 for count, size in zip(read, sizes, strict=True)
        ]


@pytest.fixture(scope="module")
def ports(directories: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("sockets")
    keys = str(write_keys(folder / "keys", KEY))
    own = ServeSettings(threads=1, served_model_name="tiny", ui=True)
    other = ServeSettings(threads=1, served_model_name="tiny", cors_origins=("*",), api_key_file=keys)
    with ExitStack() as running:
        found = []
        for method, settings in (("nested", own), ("flat", other)):
            directory, socket = directories(method), folder / method
            running.enter_context(engine_process(directory, socket, settings))
            found.append(running.enter_context(doors(directory, socket, settings)))
        yield Ports(*found, Tokenizer(directories("nested")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(ports: Ports, browser: Browser) -> Iterator[Page]:
    """The page, once its server answers; nothing that it does may raise."""
    page, errors = browser.new_page(), list[str]()
    page.set_default_timeout(SECONDS * 1000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://127.0.0.1:{ports.own.openai_port}/")
    expect(page.get_by_role("status")).to_have_text("Ready.")
    yield page
    page.close()
    assert errors == []


def fill(page: Page, document: str = DOCUMENT, tokens: int = TOKENS) -> None:
    page.get_by_label("Document", exact=False).first.fill(document)
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_label("Most tokens").fill(str(tokens))


def shown(pane: Locator) -> tuple[list[str], Shares]:
    """The passages of the text that was read, and their shares."""
    spans = pane.locator(".context span")
    return spans.all_text_contents(), [float(one) for one in spans.evaluate_all("all => all.map(s => s.dataset.share)")]


def check(ports: Ports, port: Door, pane: Locator, step: int, layers: Sequence[int] = (0, 1, 2)) -> None:
    """Compare what is shaded with what the port reports."""
    pane.get_by_label("Token").fill(str(step + 1))
    for layer, head in product(layers, (0, 1)):
        pane.get_by_label("Layer").select_option(str(layer))
        pane.get_by_label("KV head").select_option(str(head))
        texts, shares = ports.shares(port, layer, head, step)
        found, shaded = shown(pane)
        assert found[: len(texts) - 1] == texts[:-1]
        assert found[len(texts) - 1].startswith(texts[-1]), "the answer goes on with the last passage"
        assert shaded[: len(texts)] == pytest.approx(shares, abs=1e-4)
        assert sum(shares) > 0


@pytest.mark.slow
@pytest.mark.server
def test_an_answer_arrives_and_what_was_read_is_shaded(ports: Ports, page: Page) -> None:
    fill(page)
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("status")).to_contain_text(f"Answered with {TOKENS} tokens")
    pane = page.locator(".pane")
    assert pane.locator(".answer span").count() == TOKENS
    check(ports, ports.own, pane, step=TOKENS - 1)
    ratio = pane.locator(".context span").evaluate_all("all => all.map(s => getComputedStyle(s).backgroundColor)")
    assert len(set(ratio)) > 1, "shading is seen"
    assert pane.locator(".context b").count() == 0, "a document is no HTML"
    pane.locator(".answer span").first.click()
    expect(pane.locator(".told")).to_contain_text("reading the prompt gave it")
    assert set(shown(pane)[1]) == {0.0}
    assert pane.locator(".ttft").text_content() != "–" != pane.locator(".tpot").text_content()


@pytest.mark.slow
@pytest.mark.server
def test_a_keyboard_is_enough(page: Page) -> None:
    def tab(times: int = 1) -> Locator:
        for _ in range(times):
            page.keyboard.press("Tab")
        return page.locator(":focus")

    expect(tab()).to_have_id("document")
    page.keyboard.insert_text(DOCUMENT)
    tab(2)
    page.keyboard.insert_text(QUESTION)
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("Answered with")
    slider = tab(4)
    expect(slider).to_have_accessible_name("Token")
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", "All 64 tokens")
    page.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", re.compile("Token 1 of 64, “.*”"))
    page.keyboard.press("ArrowRight")
    expect(page.locator(".told")).to_contain_text("passages of 16 tokens were read")
    expect(page.locator(".told")).to_have_attribute("aria-live", "polite")
    expect(tab()).to_have_accessible_name("Layer")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_label("Layer")).to_have_value("0")
    tab(2)
    page.keyboard.press("Enter")
    expect(page.locator(".context .found")).to_have_count(1)


@pytest.mark.slow
@pytest.mark.server
def test_two_servers_side_by_side(ports: Ports, page: Page) -> None:
    """Each pane shades what its own server has read; a key goes only to the server that wants it."""
    fill(page)
    page.get_by_label("Other server to compare with").fill(ports.other.openai_url)
    page.get_by_role("button", name="Ask").click()
    own, other = page.locator(".pane").first, page.locator(".pane").last
    expect(other.get_by_role("status")).to_contain_text("This server wants an API key")
    expect(own.get_by_role("status")).to_contain_text("Answered")
    key = page.get_by_label("API key of the other server")
    expect(key).to_be_focused()
    expect(page.get_by_label("API key", exact=True)).to_be_hidden()
    key.fill(KEY)
    page.get_by_role("button", name="Ask").click()
    for port, pane in ((ports.own, own), (ports.other, other)):
        expect(pane.get_by_role("status")).to_contain_text("Answered")
        check(ports, port, pane, step=2, layers=(1,))
    boxes = own.bounding_box(), other.bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_label("Other server to compare with").fill(
        "http://127.0.0.1:1"
    )  # which must not get the key of the one before
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".pane").last.get_by_role("status")).to_contain_text("cannot be reached")
    assert page.evaluate("document.querySelector('#other-key input').value") == ""


@pytest.mark.slow
@pytest.mark.server
def test_errors_are_words(ports: Ports, page: Page) -> None:
    fill(page, document=DOCUMENT * 20)
    page.get_by_label("Other server to compare with").fill("http://127.0.0.1:1")
    page.get_by_role("button", name="Ask").click()
    own, other = page.get_by_role("status").first, page.get_by_role("status").last
    expect(own).to_contain_text("max_input_len")
    origin = f"http://127.0.0.1:{ports.own.openai_port}"
    expect(other).to_have_text(
        f"The server cannot be reached, or does not let this page ask: start it with --cors_origins {origin}."
    )
