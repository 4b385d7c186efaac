"""The demo prepares, trains and evaluates, resumes after a stop, and prints the next commands."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import Cli, Outcome
from tasks import REPOSITORY, Said, stop_at, write

from mtrain.config import config_file
from mtrain.demo import demo
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir

CORPUS = REPOSITORY / "data" / "demo"
SIZES = {"train": 400, "valid": 8, "test": 20}
TINY_MODEL = {
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 32,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
real_config_text = demo.config_text


def tiny_corpus(directory: Path) -> None:
    for split, count in SIZES.items():
        for side in ("en", "de"):
            lines = (CORPUS / f"{split}.{side}").read_text(encoding="utf-8").splitlines()
            write(directory / f"{split}.{side}", lines[:count])


def tiny_config_text(corpus: str, run_dir: str) -> str:
    tree = yaml.safe_load(real_config_text(corpus, run_dir))
    tree["tokenizer"]["vocab_size"] = 500
    tree["model"] = TINY_MODEL
    tree["training"] |= {"max_steps": 6, "validate_every": 3, "save_every": 2, "log_every": 1}
    tree["decoding"] = {"beam": 2, "max_extra_tokens": 2}
    return yaml.safe_dump(tree)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the demo small; return the working directory."""
    monkeypatch.setattr(demo, "write_corpus", tiny_corpus)
    monkeypatch.setattr(demo, "config_text", tiny_config_text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hold_to_the_report(outcome: Outcome, directory: str) -> None:
    assert outcome.code == 0, outcome.err
    lines = outcome.lines
    interval = r"\d+\.\d\d \(μ = \d+\.\d\d ± \d+\.\d\d\)"
    assert re.fullmatch(rf"demo  BLEU (0\.00|{interval})", lines[0])
    assert "|tok:13a|" in lines[1]
    assert re.fullmatch(rf"demo  chrF2 {interval}", lines[2])
    assert lines[-4:] == [
        f"The run folder is {directory}. Translate a sentence with it:",
        f'  echo "The old farmer is tired." | mtrain translate {directory}',
        "Translate on a page in the browser:",
        f"  mtrain serve {directory}",
    ]
    shown = lines[4:-4]
    assert [line.split(" ")[0] for line in shown] == ["source", "reference", "translation"] * 5
    sources = [line.removeprefix("source       ") for line in shown[::3]]
    references = [line.removeprefix("reference    ") for line in shown[1::3]]
    test = [(CORPUS / f"test.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    pairs = dict(zip(*test, strict=True))
    assert [pairs[source] for source in sources] == references
    assert len(set(sources)) == 5


def test_the_demo_trains_a_model_and_a_second_call_only_prints_the_same_report(
    cli: Cli, tiny: Path
) -> None:
    first = cli("demo", "my/demo")
    hold_to_the_report(first, "my/demo")
    assert RunDir(Path("my/demo")).model_path.exists()
    trained = RunDir(Path("my/demo")).model_path.read_bytes()
    second = cli("demo", "my/demo")
    assert second.out == first.out
    said = [line for line in second.err.splitlines() if not line.startswith("mtrain: demo: ")]
    assert said == ["my/demo: tokenized already", "my/demo: trained already"]
    assert RunDir(Path("my/demo")).model_path.read_bytes() == trained


def test_the_printed_commands_quote_a_folder_name_with_a_space(cli: Cli, tiny: Path) -> None:
    lines = cli("demo", "my demo").lines
    assert shlex.split(lines[-3])[-1] == shlex.split(lines[-1])[-1] == "my demo"


def test_the_printed_commands_use_the_path_of_the_executable_if_mtrain_is_not_on_the_search_path(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cli("demo")
    monkeypatch.setattr("sys.argv", [".venv/bin/mtrain", "demo"])
    monkeypatch.setenv("PATH", str(tiny))
    lines = demo.report(Path("runs/demo"), lambda _: None)
    assert outcome.lines[-3].endswith(" | mtrain translate runs/demo")
    assert lines[-3].endswith(" | .venv/bin/mtrain translate runs/demo")
    assert lines[-1] == "  .venv/bin/mtrain serve runs/demo"


def test_the_demo_refuses_the_folder_of_another_run_and_leaves_its_list_of_files_unchanged(
    cli: Cli, tiny: Path
) -> None:
    Path("mine").mkdir()
    tiny_corpus(Path("mine"))
    Path("mine.yaml").write_text(tiny_config_text("mine", "runs/demo"), encoding="utf-8")
    assert cli("tokenize", "mine.yaml").code == 0
    before = sorted(Path("runs").rglob("*"))
    outcome = cli("demo")
    assert outcome.code == 2
    assert outcome.err == (
        "mtrain: runs/demo: must be new, or hold a demo, but holds another run instead; name "
        "another DIR.\n"
    )
    assert sorted(Path("runs").rglob("*")) == before


def test_a_second_test_set_in_the_demo_config_is_scored_too(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_second_set(corpus: str, run_dir: str) -> str:
        tree = yaml.safe_load(tiny_config_text(corpus, run_dir))
        tree["data"]["tests"]["more"] = tree["data"]["valid"]
        return yaml.safe_dump(tree)

    monkeypatch.setattr(demo, "config_text", with_second_set)
    outcome = cli("demo")
    assert outcome.code == 0, outcome.err
    shown = [line.split(" ")[0] for line in outcome.lines]
    assert (shown.index("demo"), shown.index("more")) == (0, 4)
    assert shown.count("source") == 5


def test_a_demo_folder_whose_name_is_not_utf8_is_refused_before_anything_is_written(
    tiny: Path,
) -> None:
    with pytest.raises(ConfigError, match="must be UTF-8, as a config is, but is not"):
        demo.demo(Path("a\udcff"), Said())
    assert list(tiny.iterdir()) == []


def test_a_stopped_demo_resumes_from_its_last_checkpoint(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 3)
    stopped = cli("demo")
    assert (stopped.code, stopped.out) == (130, b"")
    assert "the same command goes on from there" in stopped.err
    outcome = cli("demo")
    hold_to_the_report(outcome, "runs/demo")
    assert "resuming from runs/demo/checkpoints/step-00000003" in outcome.err


def test_a_demo_that_died_between_writing_its_corpus_and_its_config_writes_the_config(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("d/corpus").mkdir(parents=True)
    tiny_corpus(Path("d/corpus"))
    monkeypatch.setattr(demo, "train", lambda config, run: None)
    demo.demo(Path("d"), Said())
    assert config_file.load(Path("d/demo.yaml")).run_dir == "d"


def test_a_demo_folder_that_is_a_file_gives_a_one_line_error(cli: Cli, tiny: Path) -> None:
    Path("file").write_text("x")
    outcome = cli("demo", "file")
    assert outcome.code == 2
    assert outcome.err.startswith("mtrain: file")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "directory",
    [
        "runs/demo",
        "1",
        "no",
        "a b",
        "a, b",
        "a: b",
        "a #b",
        "a[b]",
        "{a}",
        'a"b',
        "é",
        "a\tb\nc",
        "a\x7fb",
    ],
)
def test_the_demo_config_is_valid_in_any_folder(tmp_path: Path, directory: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(demo.config_text(f"{directory}/corpus", directory), encoding="utf-8")
    config = config_file.load(path)
    assert config.run_dir == directory
    assert config.data.train.src == [f"{directory}/corpus/train.en"]
    assert config.data.tests["demo"].tgt == [f"{directory}/corpus/test.de"]
