"""A package for Argos Translate can be installed there, and translates as the run does."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SRC_LINES
from conftest import Cli
from exporting import ODD, check_exact, copied, need, random_model, settings

from mtrain.errors import ConfigError, RunError
from mtrain.exporters import argos, export
from mtrain.exporters.export import ExportRequest
from mtrain.exporters.sentence_splitter import splitter
from mtrain.run.run_dir import RunDir

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZäöüمرحباஅவன்வந்தான்그는집에갔다한끝ខ្ញុំဟုတ်"
TOP = "translate-aa_bb-mtrain"


@pytest.fixture
def without_argos(monkeypatch: pytest.MonkeyPatch) -> None:
    need("argos")
    monkeypatch.setitem(sys.modules, "argostranslate", None)


def need_argos() -> None:
    if find_spec("argostranslate") is None:
        pytest.skip("argostranslate is not installed")


def read_json(package: Path, name: str) -> Any:
    with zipfile.ZipFile(package) as archive:
        return json.loads(archive.read(f"{TOP}/{name}"))


def test_a_package_has_the_files_and_the_metadata_that_argos_translate_reads(
    cli: Cli, trained: RunDir, tmp_path: Path, without_argos: None
) -> None:
    package = tmp_path / "new" / "it's aa_bb.argosmodel"
    outcome = cli("export", trained.path, package, "--to", "argos", "--check-lines", "5")
    assert outcome.code == 0, outcome.err
    assert list(package.parent.iterdir()) == [package]
    with zipfile.ZipFile(package) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        page = archive.read(f"{TOP}/README.md").decode()
    assert files == {
        f"{TOP}/{name}"
        for name in (
            "README.md",
            "export.json",
            "metadata.json",
            "minisbd/aa.onnx",
            "model/config.json",
            "model/model.bin",
            "model/shared_vocabulary.json",
            "sentencepiece.model",
        )
    }
    metadata = read_json(package, "metadata.json")
    assert (metadata["from_code"], metadata["from_name"]) == ("aa", "Afar")
    assert (metadata["to_code"], metadata["to_name"]) == ("bb", "bb")
    assert read_json(package, "model/config.json")["add_source_eos"] is True
    command = page.split("pip install argostranslate\n")[1].split("\nargos-translate")[0]
    echo = subprocess.check_output(["sh", "-c", f"echo {command}"], text=True)
    assert echo.endswith(" it's aa_bb.argosmodel\n")
    assert "\nlibretranslate --load-only aa,bb\n" in page
    assert "\n".join(outcome.lines) in page
    report = read_json(package, "export.json")
    assert report["parity"]["same_greedy"] == [5, 5]
    assert report["files"].keys() == {name.removeprefix(f"{TOP}/") for name in files} - {
        "export.json"
    }


@pytest.mark.parametrize("key", ["src_lang", "tgt_lang"])
def test_the_code_of_a_language_with_a_slash_is_refused(tmp_path: Path, key: str) -> None:
    translator, config = random_model(), settings(**{key: "en/GB"})
    with pytest.raises(ConfigError) as error:
        argos.write(translator.model, translator.tokenizer, config, tmp_path, None)
    assert str(error.value) == (
        f"`data.{key}` must have no slash for Argos Translate, whose packages have the code in "
        "names of files, but is 'en/GB' instead."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_package_needs_onnx_for_its_sentence_splitter(
    cli: Cli, trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("argos")
    monkeypatch.setitem(sys.modules, "onnx", None)
    outcome = cli("export", trained.path, tmp_path / "aa_bb.argosmodel", "--to", "argos")
    assert (outcome.code, outcome.err) == (
        2,
        "mtrain: `mtrain export --to argos` must have onnx: pip install 'mtrain[argos]' adds it.\n",
    )


def test_without_argos_translate_the_table_says_that_its_text_was_not_compared(
    cli: Cli, trained: RunDir, tmp_path: Path, without_argos: None
) -> None:
    package = tmp_path / "aa_bb.argosmodel"
    outcome = cli("export", trained.path, package, "--to", "argos", "--check-lines", "5")
    assert outcome.code == 0, outcome.err
    assert re.fullmatch("lines with the same text, Argos Translate +not compared", outcome.lines[8])
    assert outcome.lines[9] == "  without argostranslate, which pip install 'mtrain[argos]' adds"


@pytest.fixture
def other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake argostranslate; return the path of its `translate`, which each test writes."""
    need("argos")
    folder = tmp_path / "site" / "argostranslate"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "package.py").write_text(
        "import types\n"
        "install_from_path = lambda path: None\n"
        "codes = types.SimpleNamespace(from_code='aa', to_code='bb')\n"
        "get_installed_packages = lambda: [codes]\n"
    )
    metadata = folder.parent / "argostranslate-9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: argostranslate\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    paths = [str(folder.parent), os.environ.get("PYTHONPATH")]  # an empty one is the current folder
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, paths)))
    for name in [name for name in sys.modules if name.split(".")[0] == "argostranslate"]:
        monkeypatch.delitem(sys.modules, name)
    return folder / "translate.py"


SPLITTER = "class MiniSBDSentencizer:\n    def __init__(self, package): pass\n"
SPLITTER += "    def split_sentences(self, line): return [line]\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "translate = lambda *_: 'another text'",
            "argostranslate 9.0 must be the same on all lines, but only 0 of 5 lines agree",
        ),
        ("raise ValueError('no model')", "argostranslate cannot translate with the package: Value"),
    ],
)
def test_a_package_that_argos_translates_differently_or_not_at_all_is_not_written(
    cli: Cli, trained: RunDir, tmp_path: Path, other_program: Path, code: str, message: str
) -> None:
    other_program.write_text(f"{SPLITTER}{code}\n")
    package = tmp_path / "out" / "aa_bb.argosmodel"
    outcome = cli("export", trained.path, package, "--to", "argos", "--check-lines", "5")
    assert (outcome.code, outcome.out) == (2, b"")
    assert message in outcome.err.splitlines()[-1]
    assert not package.parent.exists()


def test_a_file_in_the_current_folder_is_not_run_as_argos_translate(
    tmp_path: Path, other_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_program.write_text(f"{SPLITTER}translate = lambda line, *_: line\n")
    (tmp_path / "random.py").write_text("raise SystemExit('random.py of the user')\n")
    copy = copied(random_model(), "argos", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert isinstance(copy, argos.ArgosModel)
    assert copy.translate(["one"]) == [("one", ["one"])]


def test_argos_translate_is_run_where_mtrain_is_not_installed(
    tmp_path: Path, other_program: Path
) -> None:
    other_program.write_text(f"{SPLITTER}translate = lambda line, *_: line\n")
    (tmp_path / "site" / "mtrain.py").write_text("raise ModuleNotFoundError\n")
    copy = copied(random_model(), "argos", tmp_path)
    assert isinstance(copy, argos.ArgosModel)
    assert copy.translate(["one"]) == [("one", ["one"])]


def test_the_real_argos_translate_gives_the_same_text(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    need_argos()
    package = tmp_path / "aa_bb.argosmodel"
    outcome = cli("export", trained.path, package, "--to", "argos", "--check-lines", "12")
    assert outcome.code == 0, outcome.err
    assert re.fullmatch(
        r"lines with the same text, argostranslate [\d.]+ +12 of 12", outcome.lines[8]
    )
    assert outcome.lines[9].strip().startswith("it computes in ")
    with zipfile.ZipFile(package) as archive:
        page = archive.read(f"{TOP}/README.md").decode()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    folders = {f"XDG_{name}_HOME": str(tmp_path) for name in ("DATA", "CONFIG", "CACHE")}
    no_network = "import socket\nsocket.socket.connect = None\n"
    done = subprocess.run(
        [sys.executable, "-c", no_network + code],
        cwd=tmp_path,
        env={**os.environ, **folders, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    (line,) = re.findall(r"lines = \[(.*)\]", code)
    assert done.stdout == f"[{line}]\n", done.stderr  # the task is to copy


INDEX = [{"from_code": "aa", "to_code": "bb", "package_version": "1.9", "links": []}]
UPDATE = """
import sys
import argostranslate.package as package

package.install_from_path(sys.argv[1])
(installed,) = package.get_installed_packages()
installed.update()
(installed,) = package.get_installed_packages()
print(installed.package_path.name)
"""


def test_an_update_from_the_public_index_does_not_replace_an_installed_package(
    trained: RunDir, tmp_path: Path
) -> None:
    need_argos()
    package = tmp_path / "aa_bb.argosmodel"
    export.export(trained, package, ExportRequest("argos", None, 2, None, False), print)
    index = tmp_path / "argos-translate" / "index.json"
    index.parent.mkdir()
    index.write_text(json.dumps(INDEX))
    done = subprocess.run(
        [sys.executable, "-c", UPDATE, package],
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{TOP}\n", done.stderr


def test_changes_that_argos_translate_itself_makes_to_the_text_are_noted(tmp_path: Path) -> None:
    need_argos()
    translator = random_model(tie_embeddings="none", num_decoder_layers=1)
    norm = translator.model.decoder[0].residual_3.norm
    with torch.no_grad():
        norm.weight.zero_()  # every state is the norm's bias
        (underscore,) = (
            piece
            for piece in translator.tokenizer.tgt.byte_pieces
            if translator.tokenizer.tgt.pieces_of([piece]) == ["<0x5F>"]
        )
        translator.model.output.weight[underscore] = 100 * norm.bias
    copy = copied(translator, "argos", tmp_path)
    one, two = SRC_LINES[0], f"{SRC_LINES[0]} three. Four {SRC_LINES[1]}"
    own_call = copy.own_call([one, two, *ODD])
    assert own_call is not None
    assert own_call.same == (7, 7)
    assert own_call.notes[1:] == (
        "it has split 1 line into sentences",
        "it has replaced underscores by spaces in 7 lines",
    )
    own_call = copy.own_call([one])
    assert own_call is not None
    assert own_call.notes[1:] == ("it has replaced underscores by spaces in 1 line",)


def test_a_package_has_the_outputs_and_scores_of_the_model(tmp_path: Path) -> None:
    need("argos")
    check_exact(random_model(norm="pre", positions="learned", max_positions=96), "argos", tmp_path)


def test_a_package_needs_no_space_in_the_folder_of_temporary_files(
    trained: RunDir, tmp_path: Path, other_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_program.write_text(f"{SPLITTER}translate = lambda line, *_: line\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    package = tmp_path / "new" / "aa_bb.argosmodel"
    export.export(trained, package, ExportRequest("argos", None, 2, None, False), print)
    assert list(package.parent.iterdir()) == [package]


def test_what_a_killed_export_of_a_package_left_in_a_run_folder_is_deleted_by_the_next(
    tmp_path: Path,
) -> None:
    package, config = tmp_path / "killed" / "a.argosmodel", tmp_path / "killed" / "config.yaml"
    with (
        contextlib.suppress(KeyboardInterrupt),
        export._whole(tmp_path / "run" / package.name, argos.ARCHIVE) as folder,
    ):
        (folder / "metadata.json").touch()
        shutil.copytree(tmp_path / "run", package.parent)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [package.parent]
    config.touch()
    with export._alone(package):
        assert not list(package.parent.glob(".*argosmodel*"))


def test_two_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        copied(random_model(shared=False, tie_embeddings="none"), "argos", tmp_path)
    assert str(error.value).startswith(
        "`tokenizer.shared` must be true for Argos Translate, whose packages have one "
        "SentencePiece model for both sides, but is false instead; `--to ctranslate2` or "
    )


def test_a_package_needs_the_argosmodel_suffix_and_replaces_no_file(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    outcome = cli("export", trained.path, tmp_path / "new", "--to", "argos")
    assert outcome.err == (
        "mtrain: `DIR` must be a file name of printable characters that ends in .argosmodel with "
        f"`--to argos`, but is {tmp_path / 'new'} instead.\n"
    )
    outcome = cli("export", trained.path, tmp_path / "a\udcff.argosmodel", "--to", "argos")
    assert "printable characters" in outcome.err and outcome.code == 2
    package = tmp_path / "mine.argosmodel"
    package.write_text("x")
    outcome = cli("export", trained.path, package, "--to", "argos")
    assert outcome.err == f"mtrain: {package}: already exists; choose another file.\n"
    assert package.read_text() == "x"


def test_a_package_in_a_run_folder_is_checked(tmp_path: Path, trained: RunDir) -> None:
    need("argos")
    run = RunDir(tmp_path)
    run.model_path.write_bytes(trained.model_path.read_bytes())
    package = tmp_path / "aa_bb.argosmodel"
    export.export(trained, package, ExportRequest("argos", None, 2, None, False), print)
    assert list(export.check_exports(run)) == ["aa_bb.argosmodel whole"]
    run.model_path.write_bytes(b"others")
    assert list(export.check_exports(run)) == ["aa_bb.argosmodel whole, but of other weights"]
    with zipfile.ZipFile(package, "a") as archive:
        archive.writestr(f"{TOP}/stanza/model", "x")
    with pytest.raises(RunError, match=r"aa_bb\.argosmodel: .*: stanza/model was added; del"):
        list(export.check_exports(run))
    package.write_bytes(b"no archive")
    with pytest.raises(RunError, match="it cannot be unpacked: File is not a zip file"):
        list(export.check_exports(run))
    for names in (["README.md"], ["a/export.json", "b/export.json"], [f"{TOP}/README.md"], []):
        with zipfile.ZipFile(package, "w") as archive:
            for name in names:
                archive.writestr(name, "x")
        with pytest.raises(RunError) as error:
            list(export.check_exports(run))
        assert str(error.value) == (
            f"{package}: is not an export of mtrain; move it out of the run folder."
        )
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(f"{TOP}/export.json", "x")
    with pytest.raises(RunError, match=f"^{package}: .* damaged: export.json cannot be read"):
        list(export.check_exports(run))


def test_an_archive_with_any_damaged_byte_gives_an_error(tmp_path: Path) -> None:
    package = tmp_path / "aa_bb.argosmodel"
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{TOP}/README.md", "one two three " * 9)
    whole = package.read_bytes()
    why = r"aa_bb\.argosmodel: (must be whole, but is damaged: \w|is not an export of mtrain;)"
    for place in range(len(whole)):
        package.write_bytes(whole[:place] + bytes([whole[place] ^ 0x81]) + whole[place + 1 :])
        with pytest.raises(RunError, match=why):
            list(export.check_exports(RunDir(tmp_path)))


SPLIT = [
    ["A man sleeps.", "A dog barks!", "Is it so? yes it is."],
    ["Mr. Smith and Dr. Doe left.", "Then came J. Bach."],
    ["one"],
    ["Not 3.5 but more.", "(In brackets.) „Quoted.“ Not here."],
    ["你好。", "世界！", "好"],
    ["مرحبا؟", "مرحبا"],
    ["Das ist z. B. Das hier. 5 Leute"],
    ["அவன் வந்தான்.", "அவன்"],
    ["그는 집에 갔다.", "한 끝."],
    *([f"ခ{mark}", "ဟုတ်"] for mark in "۔។།။።"),
]


@pytest.mark.parametrize("sentences", SPLIT, ids=lambda sentences: sentences[0])
def test_the_sentence_splitter_finds_the_expected_sentences_in_onnx_runtime(
    sentences: list[str],
) -> None:
    need("argos")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = onnxruntime.InferenceSession(splitter(LETTERS, "en"))
    metadata = session.get_modelmeta().custom_metadata_map
    ids = json.loads(metadata["vocab"])["_unit2id"]
    text = "".join(sentences) if sentences[0][0] == "你" else " ".join(sentences)
    units = [[*(ids.get(char, ids["<UNK>"]) for char in text), ids["<PAD>"]]]
    features = torch.zeros(1, len(text) + 1, 1).numpy()
    (labels,) = session.run(None, {"units": torch.tensor(units).numpy(), "features": features})
    ends = {position + 1 for position in (labels[0].argmax(-1) == 2).nonzero()[0].tolist()}
    bounds = sorted({0, *ends, len(text)})
    parts = [text[a:b].strip() for a, b in pairwise(bounds)]
    assert parts == sentences


@pytest.mark.parametrize("sentences", SPLIT, ids=lambda sentences: sentences[0])
def test_minisbd_finds_the_expected_sentences_with_the_sentence_splitter(
    sentences: list[str], tmp_path: Path
) -> None:
    need("argos")
    minisbd = pytest.importorskip("minisbd", reason="minisbd is not installed")
    path = tmp_path / "en.onnx"
    path.write_bytes(splitter(LETTERS, "en"))
    text = "".join(sentences) if sentences[0][0] == "你" else "  ".join(sentences)
    assert minisbd.SBDetect(str(path), use_gpu=False).sentences(text) == sentences
    long = f"{'a' * 1500}. Then {'b' * 900}. End"
    assert len(minisbd.SBDetect(str(path), use_gpu=False).sentences(long)) == 3
