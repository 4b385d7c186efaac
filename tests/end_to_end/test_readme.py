"""Every command and every config that the README shows is run, or at least parsed."""

import ast
import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from conftest import Cli
from tasks import REPOSITORY, write

from mtrain.cli.main import VERBS, command_line
from mtrain.config import config_file
from mtrain.demo import demo
from mtrain.exporters.registry import exporters

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
HEADS = {"train": 3000, "valid": 4, "test": 4}
CHEAP = [
    "model.d_model=16",
    "model.num_heads=1",
    "model.d_ff=32",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "tokenizer.vocab_size=600",
    "decoding.max_extra_tokens=0",
    "training.max_steps=1",
]


class Command(NamedTuple):
    """A command line of the README: its words, and its stdin."""

    words: list[str]
    stdin: str


def blocks(*languages: str) -> list[str]:
    found = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands() -> list[Command]:
    """Return the commands of the README's shell blocks, without prompts, comments and output."""
    found = []
    for block in blocks("sh", "console", "bash", "shell"):
        is_session = any(line.startswith("$ ") for line in block.splitlines())
        for line in block.replace("\\\n", " ").splitlines():
            if is_session and not line.startswith("$ "):
                continue
            *before, last = (
                shlex.split(part, comments=True) for part in split_pipe(line.removeprefix("$ "))
            )
            stdin = " ".join(before[0][1:]) + "\n" if before and before[0][0] == "echo" else ""
            if last:
                found.append(Command(last, stdin))
    return found


def split_pipe(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=False, punctuation_chars="|")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        parts.append([]) if word == "|" else parts[-1].append(word)
    return [" ".join(part) for part in parts]


def of_mtrain() -> list[Command]:
    """Return the mtrain commands without the program name."""
    return [
        Command(words[1:], stdin) for words, stdin in commands() if Path(words[0]).name == "mtrain"
    ]


def of_make() -> list[str]:
    return [command.words[1] for command in commands() if command.words[0] == "make"]


def shown(command: Command) -> str:
    return " ".join(command.words)


def test_the_readme_shows_commands() -> None:
    assert {"demo", "test"} <= set(of_make())
    assert {command.words[0] for command in of_mtrain()} >= set(VERBS) - {"demo"}
    assert any(command.stdin for command in of_mtrain())


@pytest.mark.parametrize("command", of_mtrain(), ids=shown)
def test_a_command_of_the_readme_parses(command: Command) -> None:
    verb, *arguments = command.words
    group = typer.main.get_command(command_line([verb]))
    group.commands[verb].make_context(verb, list(arguments))  # type: ignore[attr-defined]


def config_of(command: Command) -> Path | None:
    """Return the config that the repository has; `init` writes the other ones."""
    return next((REPOSITORY / word for word in command.words if word.startswith("configs/")), None)


@pytest.mark.parametrize("command", list(filter(config_of, of_mtrain())), ids=shown)
def test_a_config_in_a_command_of_the_readme_loads_with_the_overrides_of_the_command(
    command: Command,
) -> None:
    overrides = [b for a, b in zip(command.words, command.words[1:], strict=False) if a == "--set"]
    config_file.load(config_of(command), overrides)


@pytest.mark.parametrize("target", of_make())
def test_a_make_target_of_the_readme_exists(target: str) -> None:
    command = ["make", "--dry-run", "--always-make", target]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("text", [text for text in blocks("yaml") if "run_dir" in text])
def test_a_config_of_the_readme_loads(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    config_file.load(tmp_path / "c.yaml")


def links() -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]


@pytest.mark.parametrize("link", links())
def test_a_file_that_the_readme_links_to_exists(link: str) -> None:
    assert (REPOSITORY / link).exists()


def test_links_lead_from_the_readme_to_every_page_of_the_documentation() -> None:
    reached, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            found = re.findall(r"\]\(([^)#:]+\.md)[)#]", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in found]
    assert reached >= set((REPOSITORY / "docs").glob("*.md"))


def small_copy(directory: Path) -> None:
    """Copy the configs and the first lines of the demo corpus."""
    corpus = directory / "data" / "demo"
    corpus.mkdir(parents=True)
    for split, count in HEADS.items():
        for side in ("en", "de"):
            source = REPOSITORY / "data" / "demo" / f"{split}.{side}"
            write(corpus / source.name, source.read_text("utf-8").splitlines()[:count])
    (directory / "configs").mkdir()
    for path in (REPOSITORY / "configs").rglob("*.yaml"):
        (directory / "configs" / path.name).write_bytes(path.read_bytes())


def test_the_commands_of_the_readme_run_in_sequence(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sketched: None,
    quick_init: None,
    few_trials: None,
) -> None:
    """A prepared runs/demo replaces `make demo`; each training adds a single step.

    test_low_resource_page runs `augment` and `distill`.
    """
    small_copy(tmp_path)
    monkeypatch.chdir(tmp_path)
    cheap = [word for setting in CHEAP for word in ("--set", setting)]
    shutil.copytree("data/demo", "runs/demo/corpus")
    text = demo.config_text("runs/demo/corpus", "runs/demo")
    Path("runs/demo/demo.yaml").write_text(text, encoding="utf-8")
    outcome = cli("train", "runs/demo/demo.yaml", *cheap)
    assert outcome.code == 0, outcome.err
    num_run = 0
    for words, stdin in of_mtrain():
        configured = [word for word in words if word.startswith("configs/")]
        if words[0] in ("serve", "augment", "distill") or configured not in (
            [],
            ["configs/demo.yaml"],
        ):
            continue
        if words[0] == "export":
            library = words[words.index("--to") + 1]
            if find_spec(exporters()[library].PACKAGE) is None:  # type: ignore[index]
                continue
        num_run += 1
        steps = f"training.max_steps={num_run + 1}"
        extra = [*cheap, "--set", steps] if words[0] in ("train", "tokenize") else []
        outcome = cli(*words, *extra, stdin=stdin.encode())
        assert outcome.code == 0, f"{shown(Command(words, stdin))}: {outcome.err}"
    assert num_run >= 5


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a smaller corpus and model; `max_steps` is reduced in the code block itself."""
    small_copy(tmp_path)
    monkeypatch.chdir(tmp_path)
    config_file.save(config_file.load(Path("configs/demo.yaml"), CHEAP), Path("configs/demo.yaml"))
    (text,) = blocks("python")
    cheap = re.sub(r"max_steps=\d+", "max_steps=1", text).replace("runs/demo", "runs/short")
    assert cheap != text
    exec(compile(cheap, "README.md", "exec"), {})
    translations, best, score = capfd.readouterr().out.splitlines()
    assert len(ast.literal_eval(translations)) == 2
    assert best.startswith(ast.literal_eval(translations)[0])
    assert 0 <= float(score) <= 100
