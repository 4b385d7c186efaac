"""What several test files share: the command line in this process, and one trained run."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import io
import logging
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for tiny models, a second thread costs time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other tests need the cores it would spin on

import torch
from fork_server import MtrainProcess
from tasks import Task, copy_task, reverse_task, tiny_tree, train, write_config, write_task
from ways import COMPILED

from mtrain.autoconfig import benchmark
from mtrain.cli.main import main
from mtrain.config import config_file
from mtrain.evaluation import significance
from mtrain.ops import native
from mtrain.run.run_dir import RunDir
from mtrain.runtime import process_settings
from mtrain.runtime.signals import STOPPING

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "nightly",
    settings.get_profile("repeatable"),
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("nightly" if "MTRAIN_FUZZ" in os.environ else "repeatable")

# a shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup likewise

SETTLED = {  # enough for the copy task to be learned almost without fault
    "max_steps": 500,
    "batch_tokens": 512,
    "schedule": "linear",
    "warmup_steps": 50,
    "label_smoothing": 0.0,
    "precision": "float32",  # whatever the processor multiplies: the same model everywhere
    "log_every": 50,
    "validate_every": 200,
}


_parse, _trees = config_file._parse, dict[str, Any]()


def _parse_once(text: str, name: str) -> Any:
    """Parse a YAML text once: hundreds of tests read the same configs."""
    if text not in _trees:
        _trees[text] = _parse(text, name)
    return copy.deepcopy(_trees[text])


config_file._parse = _parse_once


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """Let no test leave another number of threads to the next one, whichever that is."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: bytes
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of stdout; "\\n" alone ends one."""
        text = self.out.decode("utf-8")
        assert text == "" or text.endswith("\n")
        return text.split("\n")[:-1]


@contextlib.contextmanager
def signals_as_before() -> Iterator[None]:
    """Leave no handler of a command to the process of the tests."""
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Cli:
    """Runs `mtrain ARGUMENTS` in this process."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[bytes]
    ) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path, stdin: bytes = b"") -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["mtrain", *map(str, arguments)])
        self.capsys.readouterr()
        with tempfile.TemporaryFile() as file, io.TextIOWrapper(file) as opened:
            file.write(stdin)
            file.seek(0)
            self.monkeypatch.setattr(sys, "stdin", opened)
            with signals_as_before(), pytest.raises(SystemExit) as stop:
                main()
        out, err = self.capsys.readouterr()
        assert stop.value.code is None or isinstance(stop.value.code, int)
        return Outcome(stop.value.code or 0, out, err.decode("utf-8"))


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    return Cli(monkeypatch, capsysbinary)


def run_mtrain(
    *arguments: str | Path, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line as a user does, in a process of its own."""
    command = [sys.executable, "-m", "mtrain", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, cwd=cwd, timeout=240)


def at_a_terminal(*arguments: str | Path) -> list[str]:
    """Run `mtrain ARGUMENTS` with a terminal 80 columns wide; return what it showed, by line."""
    code, shown = sent_to_a_terminal(*arguments)
    assert code == 0, shown
    return re.split(r"[\r\n]+", shown)


def open_terminal() -> tuple[int, int]:
    """Return both ends of a new terminal 80 columns wide: where it is read, and the terminal."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return master, terminal


def all_shown(master: int) -> bytes:
    """Read what a terminal shows until nobody holds its other end."""
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side has closed
        while part := os.read(master, 4096):
            shown += part
    return shown


class Sent(NamedTuple):
    """What a command sent to its terminal, escapes and all."""

    code: int
    text: str


def sent_to_a_terminal(*arguments: str | Path, term: str = "xterm", no_color: bool = False) -> Sent:
    """Run `mtrain ARGUMENTS` with a terminal 80 columns wide of this kind."""
    env = os.environ | {"TERM": term} | ({"NO_COLOR": "1"} if no_color else {})
    master, terminal = open_terminal()
    with MtrainProcess(*arguments, stdout=terminal, stderr=terminal, env=env) as process:
        os.close(terminal)
        shown = all_shown(master)
    os.close(master)
    return Sent(process.wait(), shown.decode())


Shell = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def shell() -> Shell:
    return run_mtrain


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of the copy task, trained by the command line. Tests only read it."""

    def make(config_path: Path) -> None:
        with MtrainProcess("train", config_path, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            said = process.stderr.read()
            assert process.wait() == 0, said

    return trained_once(tmp_path_factory, "copy", copy_task, make)


def trained_once(
    factory: pytest.TempPathFactory, name: str, task: Task, make: Callable[[Path], object]
) -> RunDir:
    """Train a settled run of a task once for all processes of pytest-xdist.

    Each process has a copy, whose lock is its own.
    """
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{directory}.lock"):
        if not (directory / "run" / "model.safetensors").is_file():
            tree = tiny_tree(directory, task, num_train=1500)
            tree["tokenizer"]["vocab_size"] = 295  # nearly all the words are whole pieces
            tree["model"] |= {"d_model": 32, "d_ff": 64, "dropout": 0.0}
            tree["training"] |= SETTLED
            make(write_config(directory / "config.yaml", tree))
    return RunDir(Path(shutil.copytree(directory / "run", factory.mktemp(name) / "run")))


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of a few updates, whose translations are noise. Tests only read it."""
    changes = ["max_steps=3", "validate_every=1", "log_every=1", "lr=1e-6", "keep_last=2"]
    config_path = write_task(tmp_path_factory.mktemp("noisy"))
    return train(config_path, *(f"training.{change}" for change in changes))


@pytest.fixture(scope="session")
def reverser(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that reverses the words of its source, from aa to bb. Tests only read it."""
    return trained_once(tmp_path_factory, "reverse", reverse_task, train)


@pytest.fixture(scope="session")
def back_run(reverser: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, from bb to aa."""
    from serving import with_languages

    return with_languages(reverser, tmp_path_factory.mktemp("back") / "run", "bb", "aa")


@pytest.fixture(scope="session")
def pair_models(trained: RunDir, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Models of en-de and de-fr that copy their source."""
    from serving import with_languages

    import mtrain

    directory = tmp_path_factory.mktemp("serve")
    pairs = [("en", "de"), ("de", "fr")]
    return [
        mtrain.load(with_languages(trained, directory / f"{src}-{tgt}", src, tgt), beam=3)
        for src, tgt in pairs
    ]


@pytest.fixture(scope="module")
def client(pair_models: list[Any]) -> Iterator[Any]:
    """Ask a server of `pair_models`.

    It ends with the module, since some tests replace the clock of the whole process, and the event
    loop of a server would wait for a time of that clock.
    """
    from serving import running

    with running(pair_models) as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that the last processes end together.

    The last one makes those after it in its process slower.
    """
    longest = ["distributed", "kills", "torchrun", "native", "trainer", "finetune", "onnx_page"]
    longest += ["page", "draw", "cli", "doctor", "server", "readme"]
    place = {f"test_{name}": number for number, name in enumerate(longest)}
    place["test_config_reads"] = len(place) + 1
    items.sort(key=lambda item: place.get(item.path.stem, len(longest)))


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never what imports and the collection of tests have made."""
    gc.collect()
    gc.freeze()
    process_settings._COLLECTED_AT = 200_000  # set when the first verb runs
    gc.set_threshold(200_000)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that began the tests how many hostile cases this one has tried."""
    from hostile import tried

    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tried"] = dict(tried)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what one of several processes has tried."""
    from hostile import tried

    tried.update(getattr(node, "workeroutput", {}).get("tried", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many hostile cases `make fuzz` has tried."""
    from hostile import tried

    if "MTRAIN_FUZZ" in os.environ:
        for name, count in tried.most_common():
            terminalreporter.write_line(f"{count:7,}  {name}")
        terminalreporter.write_line(f"{tried.total():7,}  hostile cases were tried")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Let the kernels take the test's way; return the names of the compiled functions called."""
    way = request.getfixturevalue("way") if "way" in request.fixturenames else COMPILED[0]
    if not way.is_compiled:
        monkeypatch.setattr(native, "compiled", lambda: None)
    elif native.compiled() is None:
        pytest.skip("nothing on this machine compiles C, or MTRAIN_NATIVE=0")
    else:  # whatever is faster on this processor
        monkeypatch.setattr(native.Functions, "has_fast_matmul", lambda functions: way.multiplies)
    names: list[str] = []
    call = native.Functions.call

    def noted(functions: native.Functions, name: str, *arguments: object, **shape: object):
        names.append(name)
        call(functions, name, *arguments, **shape)

    monkeypatch.setattr(native.Functions, "call", noted)
    return names


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures, but do not render them: that is the slow part."""
    draw = pytest.importorskip("mtrain.plots.draw", reason="matplotlib is not installed")

    def encode(draw_figure: Callable[[], object]) -> dict[str, bytes]:
        return dict.fromkeys(["png", "svg"], repr(draw_figure()).encode())

    monkeypatch.setattr(draw, "encode", encode)


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take half a second less for each system that is compared with a baseline."""
    monkeypatch.setattr(significance, "NUM_TRIALS", 200)


@pytest.fixture
def quick_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure speeds in a few updates and one translation, and no start of a process."""
    for name in ("_WINDOW_S", "_WARMUP_BATCHES"):
        monkeypatch.setattr(benchmark, name, 0)
    for name in ("_MIN_WINDOWS", "_MAX_WINDOWS", "_NUM_TRANSLATED"):
        monkeypatch.setattr(benchmark, name, 1)
    monkeypatch.setattr(benchmark, "startup_s", lambda: 1.0)


class Logged(logging.Handler):
    """Keeps the records that reach the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def logged() -> Iterator[Logged]:
    handler = Logged()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
