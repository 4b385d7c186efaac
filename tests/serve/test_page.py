"""The page in a real browser: typing, word alignments, files, keyboard, accessibility."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import SIZES, launched, watched_page
from serving import Client, running, with_languages

import mtrain
from mtrain.run.run_dir import RunDir
from mtrain.serve.settings import ServerSettings

TEXT = "ba ce di"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


@pytest.fixture(params=SIZES, ids=str)
def any_page(browser: Any, client: Client, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = request.param
    yield from opened(browser, client, width, scheme)


@pytest.fixture
def page(browser: Any, client: Client) -> Iterator[Any]:
    yield from opened(browser, client, 1280, "light")


def opened(browser: Any, client: Client, width: int, scheme: str) -> Iterator[Any]:
    """Open the page; then assert that it had no error and made no request to another host."""
    page, errors, urls = watched_page(browser, width, scheme)
    page.goto(f"{client.url}/")
    page.wait_for_function("() => document.getElementById('source-language').options.length > 0")
    yield page
    assert errors == []
    assert urls and all(url.startswith((f"{client.url}/", "blob:")) for url in urls)
    page.context.close()


def output(page: Any) -> str:
    return str(page.inner_text("#output"))


def wait_for(page: Any, text: str) -> None:
    page.wait_for_function(
        "text => document.getElementById('output').innerText.trim() === text", arg=text
    )


def test_the_page_translates_while_text_is_typed_replaced_and_cleared(
    any_page: Any,
) -> None:
    any_page.type("#source", f"{TEXT}\nfo gu", delay=1)
    wait_for(any_page, f"{TEXT}\nfo gu")
    assert any_page.inner_text("#count") == "14 / 10000"
    assert any_page.locator("#alternatives li").count() in (1, 2)
    any_page.fill("#source", "ha")
    wait_for(any_page, "ha")
    any_page.click("#clear")
    wait_for(any_page, "")
    assert any_page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_hovering_over_a_word_marks_its_aligned_source_words(page: Any) -> None:
    page.fill("#source", f"fo\n  {TEXT}")
    wait_for(page, f"fo\n  {TEXT}")
    page.hover(".word >> nth=2")
    links = json.loads(page.evaluate("JSON.stringify(shown.lines[1].alignment)"))
    words = [TEXT.split(" ")[src] for src, tgt in links if tgt == 1]
    assert words
    assert page.locator("#mirror mark").all_inner_texts() == words
    shown = page.inner_text("#word")
    # each word between isolates: one that runs from right to left does not reorder the other words
    between = "\u2069 … \u2068".join(words)
    assert shown.startswith(f"\u2068ce\u2069 ← \u2068{between}\u2069 (")


def test_swap_is_disabled_without_a_reverse_run_and_the_detected_language_is_shown(
    page: Any, client: Client
) -> None:
    page.select_option("#source-language", "de")
    assert page.input_value("#target-language") == "fr"
    assert page.is_disabled("#swap")  # nothing translates from French
    page.select_option("#source-language", "auto")
    page.fill("#source", "The old farmer is tired.")
    page.wait_for_function(
        "() => document.getElementById('message').innerText.startsWith('From English (')"
    )


def test_a_language_that_cannot_be_detected_is_not_offered_for_detection(
    browser: Any, trained: RunDir, tmp_path: Path
) -> None:
    sorbian = mtrain.load(with_languages(trained, tmp_path / "run", "hsb", "de"))
    with running([sorbian]) as client:
        for page in opened(browser, client, 1280, "light"):
            assert page.locator("#source-language option").all_inner_texts() == ["hsb"]
            assert page.locator("#target-language option").all_inner_texts() == ["German"]


@pytest.fixture
def both_ways(
    browser: Any, pair_models: list[mtrain.Model], trained: RunDir, tmp_path: Path
) -> Iterator[Any]:
    """The page of a server with runs of both directions."""
    back = mtrain.load(with_languages(trained, tmp_path / "run", "de", "en"), beam=3)
    with running([pair_models[0], back], ServerSettings(port=0)) as client:
        yield from opened(browser, client, 1280, "light")


def test_flags_that_ask_for_no_check_are_not_shown(page: Any) -> None:
    """A line that was split, or retried because of a loop."""
    for flags, text in (
        (["split", "retried"], ""),
        (["copy", "split"], "Check the translation: a line is a copy of the text."),
    ):
        code = "flags => { sayHow({ details: [{ flags }] }); return $('message').textContent; }"
        assert page.evaluate(code, flags) == text


def test_the_direction_is_that_of_the_script_of_a_code_or_of_its_language(page: Any) -> None:
    codes = {
        "rtl": ["ar", "ar-EG", "AR", "arb_Arab", "heb", "pes_Arab", "urd", "iw", "pa-Arab"],
        "ltr": ["en", "zh-TW", "arb_Latn", "ur-Latn", "kas_Deva", "az", "hsb", "tha_Thai"],
    }
    for direction, expected in codes.items():
        assert page.evaluate("codes => codes.map(directionOf)", expected) == [direction] * len(
            expected
        )


def languages(page: Any) -> list[str]:
    return [page.input_value(f"#{name}-language") for name in ("source", "target")]


def test_alt_s_swaps_the_languages_when_both_directions_have_a_run(both_ways: Any) -> None:
    both_ways.fill("#source", TEXT)
    wait_for(both_ways, TEXT)
    both_ways.keyboard.press("Alt+KeyS")
    assert languages(both_ways) == ["de", "en"]
    wait_for(both_ways, TEXT)


def test_text_typed_after_the_shown_translation_is_kept_when_the_languages_are_swapped(
    both_ways: Any,
) -> None:
    both_ways.fill("#source", TEXT)
    wait_for(both_ways, TEXT)
    both_ways.evaluate("source.value = 'fo gu'; swap()")  # before it is translated
    assert both_ways.input_value("#source") == "fo gu"
    wait_for(both_ways, "fo gu")


def test_swapped_languages_are_remembered(both_ways: Any) -> None:
    both_ways.click("#swap")
    both_ways.reload()
    both_ways.wait_for_function("() => languages.length && to.value === 'en'")
    assert languages(both_ways) == ["de", "en"]


PRESS = """([key, platform]) => {
    const property = { get: () => platform, configurable: true };
    Object.defineProperty(navigator, "platform", property);
    const options = { key, code: "KeyS", altKey: true, bubbles: true, cancelable: true };
    return !document.getElementById("source").dispatchEvent(new KeyboardEvent("keydown", options));
}"""


def test_option_s_on_a_mac_types_its_character(both_ways: Any) -> None:
    assert not both_ways.evaluate(PRESS, ["ß", "MacIntel"])
    assert languages(both_ways) == ["en", "de"]
    assert both_ways.evaluate(PRESS, ["ы", "Linux x86_64"])
    assert languages(both_ways) == ["de", "en"]


def test_typing_tab_order_and_word_selection_work_by_keyboard_alone(page: Any) -> None:
    assert page.evaluate("document.activeElement.id") == "source"
    page.keyboard.type(TEXT)
    wait_for(page, TEXT)
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached[:4] == ["choose", "clear", "output", "copy"]
    page.focus("#output")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".word.active") == "ce"
    page.keyboard.press("Escape")
    assert page.locator(".word.active").count() == 0


def test_a_translated_file_is_downloaded_with_as_many_lines_as_its_source(
    page: Any, tmp_path: Path
) -> None:
    lines = [TEXT, "", *["fo gu"] * 150]
    (tmp_path / "text.txt").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    page.set_input_files("#file", tmp_path / "text.txt")
    page.wait_for_selector("#download:not([hidden])")
    assert page.inner_text("#job-status") == "152 lines are translated."
    assert page.evaluate("document.getElementById('progress').value") == 1
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "text.de.txt"
    assert Path(download.value.path()).read_text("utf-8") == "\n".join(lines) + "\n"


def test_a_file_is_translated_to_the_language_chosen_when_it_was_opened(
    page: Any, tmp_path: Path
) -> None:
    """The languages on the page change after the first of two requests."""
    page.evaluate(
        """() => {
            const original = fetch;
            window.pairs = [];
            window.fetch = (path, options) => {
                const fields = JSON.parse(options.body);
                if (Array.isArray(fields.q)) {
                    pairs.push(`${fields.source} ${fields.target}`);
                    document.getElementById("source-language").value = "auto";
                    document.getElementById("target-language").value = "fr";
                }
                return original(path, options);
            };
        }"""
    )
    (tmp_path / "text.txt").write_text("fo gu\n" * 150, encoding="utf-8")
    page.set_input_files("#file", tmp_path / "text.txt")
    page.wait_for_selector("#download:not([hidden])")
    assert page.evaluate("pairs") == ["en de", "en de"]
    assert page.get_attribute("#download", "download") == "text.de.txt"


BUSY = """most => {
    const original = fetch;
    const soon = { status: 503, headers: { "Retry-After": "0.01" } };
    window.sizes = [];
    window.fetch = async (path, options) => {
        sizes.push(JSON.parse(options.body).q.length);
        return sizes.at(-1) > most ? new Response("{}", soon) : original(path, options);
    };
}"""


def test_lines_of_a_file_that_take_too_long_together_are_sent_in_smaller_batches(
    page: Any, tmp_path: Path
) -> None:
    page.evaluate(BUSY, 8)
    text = "ba\nce\ndi\nfo\ngu\n" * 12
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    page.set_input_files("#file", tmp_path / "text.txt")
    page.wait_for_selector("#download:not([hidden])")
    sizes = page.evaluate("sizes")
    assert sizes[:6] == [60, 30, 15, 8, 8, 8]  # not 52 after the first that is answered
    assert sizes[6:] == [9, 5, 5, 5, 6, 6, 7, 2]  # a larger batch is tried after several answers
    with page.expect_download() as download:
        page.click("#download")
    assert Path(download.value.path()).read_text("utf-8") == text


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("fo gu", "50 lines are translated."),
        ("é" * 100, "Line 1 has more than the 200 bytes of a request."),
    ],
    ids=["short lines", "a long line"],
)
def test_a_batch_of_a_file_has_at_most_the_bytes_that_the_server_reads(
    browser: Any, pair_models: list[mtrain.Model], tmp_path: Path, line: str, status: str
) -> None:
    (tmp_path / "text.txt").write_text(f"{line}\n" * 50, encoding="utf-8")
    with running(pair_models, ServerSettings(port=0, max_body=200)) as client:
        for page in opened(browser, client, 1280, "light"):
            page.set_input_files("#file", tmp_path / "text.txt")
            page.wait_for_function("() => $('cancel').textContent === 'Close'")
            assert page.inner_text("#job-status") == status


def test_the_progress_of_a_file_is_not_shown_for_the_next_one(page: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("fo gu\n", encoding="utf-8")
    page.set_input_files("#file", tmp_path / "text.txt")
    page.wait_for_selector("#download:not([hidden])")
    page.evaluate("() => { window.fetch = () => new Promise(() => {}); }")
    page.set_input_files("#file", tmp_path / "text.txt")
    page.wait_for_selector("#download", state="hidden")
    assert page.inner_text("#job-status") == ""
    assert page.evaluate("document.getElementById('progress').value") == 0


DROP = """isFile => {
    const data = new DataTransfer();
    if (isFile) data.items.add(new File(["fo gu"], "text.txt"));
    else data.setData("text/plain", "fo gu");
    return ["dragover", "drop"].map((name) => {
        const options = { dataTransfer: data, bubbles: true, cancelable: true };
        return !document.getElementById("source").dispatchEvent(new DragEvent(name, options));
    });
}"""


def test_a_dropped_file_is_translated_and_dropped_text_is_left_to_the_text_field(page: Any) -> None:
    assert page.evaluate(DROP, False) == [False, False]  # not prevented
    assert page.is_hidden("#job") and page.locator(".target-of-drop").count() == 0
    assert page.evaluate(DROP, True) == [True, True]
    page.wait_for_selector("#download:not([hidden])")


def test_copying_without_a_secure_context_keeps_the_focus(page: Any) -> None:
    """As on the page of another machine, without TLS."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.fill("#source", TEXT)
    wait_for(page, TEXT)
    page.focus("#copy")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('message').textContent === 'Copied.'")
    assert page.evaluate("document.activeElement.id") == "copy"
    page.fill("#source", "")
    page.keyboard.press("Control+V")
    assert page.input_value("#source") == TEXT


def test_markup_is_shown_as_text(page: Any) -> None:
    page.fill("#source", "<img src=x onerror=document.title=1> ba")
    page.wait_for_selector(".word")
    assert page.locator("#output img, #mirror img, #alternatives img").count() == 0
    assert page.title() == "Translate"


def test_the_api_documentation_page_shows_its_endpoints(page: Any, client: Client) -> None:
    page.goto(f"{client.url}/docs")
    page.wait_for_selector("section h2 >> text=POST /translate")
    assert page.locator("td >> text=alternatives").count() == 2
    assert "`" not in page.inner_text("body")


def test_the_api_documentation_page_breaks_no_name_of_a_field_and_does_not_scroll_sideways(
    any_page: Any, client: Client
) -> None:
    any_page.goto(f"{client.url}/docs")
    any_page.wait_for_selector("section h2 >> text=POST /translate")
    names = "[...document.querySelectorAll('td code')]"
    assert any_page.evaluate(f"{names}.every(name => name.getClientRects().length === 1)")
    assert any_page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_axe_finds_no_accessibility_violation(any_page: Any, client: Client) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")
    any_page.fill("#source", TEXT)
    wait_for(any_page, TEXT)
    any_page.hover(".word >> nth=0")
    for path in ("/", "/docs"):
        if path != "/":
            any_page.goto(f"{client.url}{path}")
            any_page.wait_for_selector("section h2 >> text=POST /translate")
        any_page.evaluate(
            script
        )  # through the debugger, to which the page's content security policy does not apply
        found = any_page.evaluate("axe.run()")
        shown = [
            (each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]
        ]
        assert shown == []
        assert len(found["passes"]) > 10


def test_the_content_security_policy_allows_only_the_own_host(client: Client) -> None:
    for path in ("/", "/docs"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy and "http" not in policy
