"""The page of an ONNX export in a real browser: what it shows, and that it needs no network."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import SIZES, copy_library, launched, served, watched_page
from serving import with_languages
from tasks import copy_task

from mtrain.decode.formats import Translation, join
from mtrain.errors import RunError
from mtrain.exporters import export, onnx_page
from mtrain.exporters.export import ExportRequest
from mtrain.exporters.onnx import OnnxModel
from mtrain.run.run_dir import RunDir

for package in ("onnx", "onnxruntime", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

IS_LOADED = "() => document.getElementById('message').textContent === ''"


@pytest.fixture(scope="module")
def directory(trained: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "copy"
    run = RunDir(with_languages(trained, path.with_name("run"), "en", "de"))
    export.export(run, path, ExportRequest("onnx", has_page=True), lambda _: None)
    return path


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    """Serve the page, with the JavaScript library where the command on the page puts it."""
    whole = shutil.copytree(directory, directory.with_name("whole"))
    library = copy_library(whole)
    assert {each.name for each in library.iterdir()} == set(onnx_page.LIBRARY_FILES)
    with served(whole) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from launched()


def opened(browser: Any, url: str, width: int, scheme: str) -> Iterator[Any]:
    """Open the page; at the end, assert no error and no request to another host."""
    page, errors, urls = watched_page(browser, width, scheme)
    page.goto(url)
    yield page
    assert [error for error in errors if "404" not in error] == []  # a missing library
    assert urls and all(each.startswith(url) for each in urls)
    page.context.close()


@pytest.fixture(scope="module", params=SIZES, ids=str)
def any_page(browser: Any, url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from opened(browser, url, *request.param)


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    yield from opened(browser, url, *SIZES[0])


@pytest.fixture
def bare_page(browser: Any, directory: Path) -> Iterator[Any]:
    """The page without the JavaScript library."""
    with served(directory) as url:
        yield from opened(browser, url, *SIZES[2])


def translated(page: Any, text: str) -> str:
    """Enter a text; return the translation once it has as many lines as the text."""
    page.wait_for_function(IS_LOADED)
    page.fill("#source", text)
    page.wait_for_function(
        "count => document.getElementById('output').textContent.split('\\n').length === count "
        "&& document.getElementById('output').textContent !== '' "
        "&& document.getElementById('message').textContent === ''",
        arg=text.count("\n") + 1,
    )
    return str(page.inner_text("#output"))


def test_the_page_translates_twenty_lines_as_onnx_runtime_does(
    any_page: Any, directory: Path
) -> None:
    lines = [pair.src for pair in copy_task(18, seed=7)] + ["</s> ba 😀", "  ce  di"]
    model = OnnxModel(directory).quantised
    assert model is not None
    ids = [model.encode([line]) for line in lines]
    found = [model.search(row, 1, [len(row[0]) + 4]) for row in ids]
    expected = [model.decode([each.ids])[0] for (each,) in found]
    assert translated(any_page, "\n".join(lines)) == "\n".join(expected)
    assert sum(a == b for a, b in zip(lines, expected, strict=True)) >= 16  # a copy task
    assert any_page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_blank_lines_stay_blank_and_a_long_line_is_translated_by_sentences(page: Any) -> None:
    assert translated(page, "ba ce\n\n  \r\nfo gu") == "ba ce\n\n\nfo gu"
    sentence = "ba ce di fo gu ha! "
    shown = translated(page, sentence * 6)
    assert shown.count("ba ce") >= 5
    page.fill("#source", "ba ce di fo gu ha " * 20)
    page.wait_for_selector("#message.error")
    assert page.inner_text("#message") == "A sentence has more than 32 tokens: split it."


# whose tokens are characters, and whose translation of a text is the text
COPYING_LIBRARY = """\
export const env = { backends: { onnx: { wasm: {} } } };
const tokenizer = (text) => ({ input_ids: { dims: [1, text.length] }, text });
tokenizer.batch_decode = ([text]) => [text.trim()];
export const AutoTokenizer = { from_pretrained: async () => tokenizer };
const model = { generate: async ({ text }) => [text] };
export const AutoModelForSeq2SeqLM = { from_pretrained: async () => model };
"""


def test_no_space_separates_chinese_or_japanese_sentences_of_a_long_line(
    browser: Any, directory: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "library").mkdir()
    (copy / "library" / "transformers.min.js").write_text(COPYING_LIBRARY)
    parts = [
        "日本語の文です。",
        "「そうですか？」",
        "はい！",
        "Good evening. ",
        "Good night! ",
        "是的。",
    ]
    with served(copy) as url:
        for page in opened(browser, url, *SIZES[0]):
            shown = translated(page, "".join(parts))
    assert shown == "日本語の文です。「そうですか？」はい！Good evening. Good night! 是的。"
    assert shown == join([Translation(part.strip()) for part in parts]).text


def test_a_loaded_page_translates_offline_after_a_reload(page: Any) -> None:
    assert translated(page, "ba ce") == "ba ce"
    page.evaluate("() => navigator.serviceWorker.ready.then(() => null)")
    page.wait_for_function("() => navigator.serviceWorker.controller?.state === 'activated'")
    page.context.set_offline(True)
    page.reload()
    assert translated(page, "di fo gu") == "di fo gu"


def test_the_page_can_be_used_with_the_keyboard_alone(page: Any) -> None:
    page.wait_for_function(IS_LOADED)
    assert page.evaluate("document.activeElement.id") == "source"
    page.keyboard.type("ba ce")
    page.wait_for_function("() => document.getElementById('output').textContent === 'ba ce'")
    page.wait_for_selector("#copy:not([disabled])")
    reached = []
    for _ in range(3):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached == ["clear", "output", "copy"]
    page.keyboard.press("Enter")
    page.wait_for_function("() => /^The translation is/.test(message.textContent)")
    page.focus("#clear")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('output').textContent === ''")
    assert page.evaluate("document.activeElement.id") == "source"


def test_without_the_library_the_page_shows_the_commands_that_install_it(bare_page: Any) -> None:
    bare_page.wait_for_selector("#command:not([hidden])")
    assert bare_page.inner_text("#command") == onnx_page.LIBRARY_COMMAND
    assert bare_page.inner_text("#message").startswith("The library is missing.")
    assert bare_page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# A library whose model copies, and whose tokens are characters.
LIBRARY = """
export const env = { backends: { onnx: { wasm: {} } } };
const tokenize = (text) => ({ input_ids: { dims: [1, text.length] }, text });
tokenize.batch_decode = (texts) => texts;
const model = { generate: async ({ text }) => [text.trim()] };
export const AutoTokenizer = { from_pretrained: async () => tokenize };
export const AutoModelForSeq2SeqLM = { from_pretrained: async () => model };
"""


def copied(directory: Path, copy: Path) -> Path:
    """Copy a page, with `LIBRARY` as its JavaScript library."""
    shutil.copytree(directory, copy)
    (copy / "library").mkdir()
    (copy / "library" / "transformers.min.js").write_text(LIBRARY, encoding="utf-8")
    return copy


@pytest.mark.parametrize("code", ["pt_BR", "my dialect"])
def test_a_page_with_language_codes_of_any_form_translates_long_lines(
    browser: Any, directory: Path, tmp_path: Path, code: str
) -> None:
    copy = copied(directory, tmp_path / "copy")
    run = RunDir(directory.with_name("run"))
    data = run.config.data.model_copy(update={"src_lang": code})
    onnx_page.write(run.config.model_copy(update={"data": data}), copy)
    with served(copy) as url:
        for page in opened(browser, url, *SIZES[0]):
            text = "This is one sentence. And this another."
            assert translated(page, text) == text
            assert page.inner_text("#languages") == f"{code} to German"


def test_without_a_service_worker_the_page_translates(
    browser: Any, directory: Path, tmp_path: Path
) -> None:
    copy = copied(directory, tmp_path / "copy")
    with served(copy) as url:
        page, errors, _ = watched_page(browser, *SIZES[0])
        page.add_init_script(
            """navigator.serviceWorker.register = () => new Promise((_, reject) => {
                setTimeout(() => { window.isRefused = true; reject(new Error("no")); }, 200);
            });"""
        )
        page.goto(url)
        page.wait_for_function("() => window.isRefused")
        assert page.inner_text("#message") == ""
        assert translated(page, "ba ce") == "ba ce" and errors == []
        page.context.close()


def test_axe_finds_no_violation_of_accessibility_rules(any_page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text("utf-8")
    translated(any_page, "ba ce")
    any_page.evaluate(script)  # by the debugger, which the page's policy does not restrict
    found = any_page.evaluate("axe.run()")
    shown = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]]
    assert shown == [] and len(found["passes"]) > 10


def test_the_page_names_no_other_host_and_its_security_policy_allows_none(directory: Path) -> None:
    html = (directory / "index.html").read_text("utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
    assert policy.startswith("default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; ")
    assert set(re.findall(r"(?:'self'|'none'|'wasm-unsafe-eval'|\S+)(?=;|$| ')", policy)) <= {
        *("'self'", "'none'", "'wasm-unsafe-eval'"),
        *("default-src", "script-src", "style-src", "img-src", "connect-src", "worker-src"),
        *("base-uri", "form-action"),
    }
    for name in ("index.html", "page.js", "page.css", "page.json", "service-worker.js"):
        text = (directory / name).read_text("utf-8")
        assert "//" not in re.sub(r"(^|\s)// .*", "", text), name


def test_an_export_with_the_library_of_its_page_is_whole(directory: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(directory, tmp_path / "page")
    (folder / "library").mkdir(exist_ok=True)
    for name in onnx_page.LIBRARY_FILES:
        (folder / "library" / name).write_text("x")
    assert len([*export.check_exports(RunDir(tmp_path))]) == 1
    (folder / "library" / "other.js").write_text("x")
    with pytest.raises(RunError, match=r"library/other\.js was added"):
        list(export.check_exports(RunDir(tmp_path)))


def test_another_model_gives_another_version_of_the_page(directory: Path) -> None:
    def version() -> str:
        worker = (directory / "service-worker.js").read_text("utf-8")
        (found,) = re.findall(r'const VERSION = "([0-9a-f]{16})";', worker)
        return str(found)

    before, settings = version(), RunDir(directory.with_name("run")).config
    onnx_page.write(settings, directory)
    assert version() == before
    config = directory / "config.json"
    content = config.read_bytes()
    config.write_bytes(content + b"\n")
    onnx_page.write(settings, directory)
    assert version() != before
    config.write_bytes(content)
    onnx_page.write(settings, directory)
