"""The command `mtrain serve`: its address, its shutdown, and its error messages."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Cli
from fork_server import MtrainProcess
from serving import JSON, Answer, Client, running, wait_until, with_languages
from tasks import copy_task

import mtrain
from mtrain.cli.console import log_on_stderr
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir
from mtrain.serve.server import listen
from mtrain.serve.settings import ServerSettings

TEXT = "ba ce di"
WATCHED = (  # print each attempt to open a connection or look up an address
    "import sys; sys.addaudithook(lambda event, data: print(event, data, file=sys.stderr) "
    "if event in ('socket.connect', 'socket.sendto', 'socket.getaddrinfo') else None); "
)


Process = subprocess.Popen[str] | MtrainProcess


@contextmanager
def started(*arguments: str | Path, is_watched: bool = False) -> Iterator[tuple[Process, Client]]:
    """Run `mtrain serve` on a free port; `is_watched` prints its connections to stderr."""
    command = ["serve", *map(str, arguments), "--port", "0"]
    process: Process
    if is_watched:
        code = f"{WATCHED}from mtrain.cli.main import main; main()"
        command = [sys.executable, "-c", code, *command]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    else:
        process = MtrainProcess(*command, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            address = re.match(r"http://127\.0\.0\.1:\d+", line)
            assert address, line + process.stderr.read()
            yield process, Client(address[0])
        finally:
            process.kill()


def test_command_line_python_interface_and_server_translate_identically(
    trained: RunDir, cli: Cli, tmp_path: Path
) -> None:
    run = with_languages(trained, tmp_path / "run", "en", "de")
    held_out = [pair.src for pair in copy_task(30, 5)]
    by_command = cli("translate", run, stdin="".join(f"{line}\n" for line in held_out).encode())
    by_interface = mtrain.load(run).translate(held_out)
    with started(run) as (_, client):
        body = {"q": held_out, "source": "en", "target": "de"}
        by_server = client.post("/translate", body).tree["translatedText"]
    assert by_command.lines == by_interface == by_server


def test_ctranslate2_translations_are_served_and_unsupported_fields_refused(
    trained: RunDir, cli: Cli, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    run = with_languages(trained, tmp_path / "run", "en", "de")
    held_out = [pair.src for pair in copy_task(20, 5)]
    lines = "".join(f"{line}\n" for line in held_out).encode()
    by_command = cli("translate", run, "--engine", "ctranslate2", stdin=lines)
    assert by_command.code == 0, by_command.err
    with started(run, "--engine", "ctranslate2") as (_, client):
        body = {"q": held_out, "source": "en", "target": "de"}
        assert client.post("/translate", body).tree == {"translatedText": by_command.lines}
        body["q"] = TEXT
        (details,) = client.post("/translate", body | {"details": True}).tree["details"]
        assert details["alignment"] is None
        assert details["tokens"] and details["token_log_probs"] == []
        for field, text in (
            ({"prefix": "ba"}, "prefix is not available with CTranslate2"),
            ({"alternatives": 1}, "alternatives parameter must be <= 0"),
        ):
            answer = client.post("/translate", body | field)
            assert (answer.status, answer.tree) == (400, {"error": f"Invalid request: {text}"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_sigint_end_the_server_with_128_plus_the_signal_number(
    trained: RunDir, tmp_path: Path, number: signal.Signals
) -> None:
    run = with_languages(trained, tmp_path / "run", "en", "de")
    with started(run) as (process, client):
        assert client.get("/health").status == 200
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number


def ask(client: Client) -> tuple[threading.Thread, list[Answer]]:
    """Start a thread that asks for a translation and adds the answer to the list."""
    answers: list[Answer] = []
    body = {"q": TEXT, "source": "en", "target": "de"}
    thread = threading.Thread(target=lambda: answers.append(client.post("/translate", body)))
    thread.start()
    return thread, answers


def test_a_running_translation_is_finished_when_the_server_stops(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    translate = mtrain.Model.translate

    def waiting(self: mtrain.Model, *arguments: object, **options: object) -> object:
        has_begun.set()
        assert may_end.wait(30)
        return translate(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(mtrain.Model, "translate", waiting)
    with running(pair_models) as client:
        thread, answers = ask(client)
        assert has_begun.wait(30)
        client.stop()
        wait_until(lambda: not client.takes_connections())
        may_end.set()
        thread.join(30)
    assert [answer.tree for answer in answers] == [{"translatedText": TEXT}]


def test_a_translation_that_is_cut_off_when_the_server_stops_is_answered_503(
    pair_models: list[mtrain.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def waiting(self: mtrain.Model, *arguments: object, **options: object) -> object:
        has_begun.set()
        assert may_end.wait(30)
        raise CancelledError

    monkeypatch.setattr(mtrain.Model, "translate", waiting)
    monkeypatch.setattr("mtrain.serve.server._GRACE_S", 0)
    with running(pair_models) as client:
        thread, answers = ask(client)
        assert has_begun.wait(30)
        client.stop()
        thread.join(30)
        may_end.set()
    (answer,) = answers
    assert (answer.status, answer.tree) == (503, {"error": "Server is shutting down"})
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")


def test_the_server_opens_no_outgoing_connection(trained: RunDir, tmp_path: Path) -> None:
    run = with_languages(trained, tmp_path / "run", "en", "de")
    with started(run, is_watched=True) as (process, client):
        for body in ({"q": TEXT}, {"q": f"<p>{TEXT}</p>", "format": "html", "details": True}):
            fields = body | {"source": "auto", "target": "de"}
            assert client.post("/translate", fields).status == 200
        for path in ("/", "/languages", "/spec"):
            assert client.get(path).status == 200
        process.terminate()
        assert process.stderr is not None
        assert "socket." not in process.stderr.read()


def test_the_audit_hook_reports_an_outgoing_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = f"{WATCHED}import socket; socket.create_connection({other.getsockname()})"
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "socket.connect" in result.stderr


def test_the_default_host_is_127_0_0_1() -> None:
    assert ServerSettings().host == "127.0.0.1"


def test_accepted_connections_have_tcp_nodelay() -> None:
    with (
        listen(ServerSettings(port=0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_texts_are_logged_only_with_log_text(trained: RunDir, tmp_path: Path) -> None:
    run = with_languages(trained, tmp_path / "run", "en", "de")
    body = {"q": "ba ce", "source": "en", "target": "de", "api_key": "secret-key"}
    for option, is_shown in (("--page", False), ("--log-text", True)):
        with started(run, option) as (process, client):
            assert client.post("/translate", body).status == 200
            assert client.get("/ba?q=ba").status == 404
            process.terminate()
            assert process.stderr is not None
            log = process.stderr.read()
        assert re.search(r"^POST /translate 200 \d+ ms, 1 text, 5 characters$", log, re.MULTILINE)
        assert ("ba" in log) == is_shown
        assert "secret" not in log
        assert "\nGET other 404" in log


def test_unprintable_characters_of_logged_texts_are_escaped(
    pair_models: list[mtrain.Model], capsys: pytest.CaptureFixture[str]
) -> None:
    text = "ba \x9b2J \u202e \U000e0001 ä"
    with log_on_stderr(), running(pair_models, ServerSettings(port=0, log_text=True)) as client:
        assert client.post("/translate", {"q": text, "source": "en", "target": "de"}).status == 200
    (logged,) = (line for line in capsys.readouterr().err.splitlines() if "[" in line)
    assert logged.isprintable() and "ä" in logged
    assert json.loads(logged[logged.index("[") :])[0] == text


def refused(cli: Cli, *arguments: str | Path) -> str:
    outcome = cli("serve", *arguments)
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.count("\n") == 1
    return outcome.err.removeprefix("mtrain: ").removesuffix("\n")


def test_serve_without_a_run_folder_names_what_is_missing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(cli) == "`mtrain serve` must have a run folder, or `--demo`."
    text = "runs/demo: there is no demo yet; `mtrain demo` trains it, in minutes."
    assert refused(cli, "--demo") == text
    text = "`--demo` must stand without a run folder: it serves runs/demo."
    assert refused(cli, "--demo", "run") == text
    assert list(tmp_path.iterdir()) == []


def test_two_runs_with_the_same_language_pair_are_refused(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    run = with_languages(trained, tmp_path / "run", "en", "de")
    assert refused(cli, run, run, "--port", "0") == (
        f"{run}: must translate another pair of languages than {run}, but both translate from en "
        "to de."
    )


def test_a_run_of_one_language_is_refused_since_its_texts_would_be_returned_unchanged(
    cli: Cli, trained: RunDir, tmp_path: Path
) -> None:
    run = with_languages(trained, tmp_path / "run", "en", "en")
    assert refused(cli, run, "--port", "0") == (
        f"{run}: must translate between two languages, but translates from en to en."
    )


def test_an_address_in_use_is_an_error(cli: Cli, trained: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert refused(cli, trained.path, "--port", str(port)) == (
            f"`--host` and `--port` must name an address to listen on, but 127.0.0.1 port {port} "
            "cannot be used: Address already in use."
        )


@pytest.mark.parametrize("host", ["no host", "ä..b"])
def test_an_unknown_host_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError) as error:
        listen(ServerSettings(host=host, port=0))
    begin = f"`--host` and `--port` must name an address to listen on, but {host} port 0 cannot be "
    assert re.fullmatch(rf"{begin}used: [\w ]+\.", str(error.value))


def test_an_empty_host_is_refused_and_does_not_mean_all_addresses(
    cli: Cli, trained: RunDir
) -> None:
    assert refused(cli, trained.path, "--host", "") == (
        "`--host` must be an address, but is empty."
    )


def test_a_url_prefix_must_begin_with_a_slash_and_end_without_one(
    cli: Cli, trained: RunDir
) -> None:
    for prefix in ("mt", "/mt/", "//mt", "/"):
        assert refused(cli, trained.path, "--url-prefix", prefix) == (
            "`--url-prefix` must begin with a slash and end without one, but is "
            f"{prefix!r} instead."
        )
    for prefix in ("/{x:foo}", "/a?b", "/#"):
        assert refused(cli, trained.path, "--url-prefix", prefix) == (
            f"`--url-prefix` must have none of `{{}}?#`, but is {prefix!r} instead."
        )


@pytest.mark.parametrize("wrong", ["localhost", "10.0.0.1/8", "", "*,10.0.0.1", "::1,300.0.0.1"])
def test_addresses_of_proxies_that_would_have_no_effect_are_refused(
    cli: Cli, trained: RunDir, wrong: str
) -> None:
    text = "`--trust-proxy` must be IP addresses or networks with commas between them, or *, but "
    assert refused(cli, trained.path, "--trust-proxy", wrong).startswith(f"{text}has '")
    ServerSettings(trust_proxy="127.0.0.1, ::1,10.0.0.0/8")
    ServerSettings(trust_proxy="*")


def test_options_that_ctranslate2_does_not_honour_are_named_as_on_the_command_line(
    cli: Cli, trained: RunDir
) -> None:
    for option, value in (("precision", "int8"), ("device", "cuda"), ("shortlist", "fast")):
        assert refused(cli, trained.path, "--engine", "ctranslate2", f"--{option}", value) == (
            f"`--{option}` has no effect with `--engine ctranslate2`; leave it out."
        )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"# none\n\n", "must have a key on a line, but has none."),
        (b"long-enough\nshort\n", "line 2 must have at least 8 characters, but has 5."),
        (b"\xff\xfe", "must be UTF-8 text, but is not."),
    ],
)
def test_an_invalid_api_keys_file_is_an_error(
    cli: Cli, trained: RunDir, tmp_path: Path, content: bytes, text: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    assert refused(cli, trained.path, "--api-keys", path) == f"{path}: {text}"


def test_a_key_from_the_api_keys_file_is_accepted(trained: RunDir, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("clé-première\n# the keys\n first-key \n", encoding="utf-8-sig")
    run = with_languages(trained, tmp_path / "run", "en", "de")
    body = {"q": TEXT, "source": "en", "target": "de"}
    with started(run, "--api-keys", keys) as (_, client):
        assert client.post("/translate", body).status == 403
        assert client.post("/translate", body | {"api_key": "first-key"}).status == 200
        assert client.post("/translate", body | {"api_key": "clé-première"}).status == 200
        headers = {"Content-Type": JSON, "Authorization": "Bearer clé-première".encode()}
        content = json.dumps(body).encode()
        assert client.send("POST", "/translate", content, headers).status == 200


def test_serve_without_starlette_names_the_extra_to_install(
    cli: Cli, trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtrain.errors.find_spec", lambda name: None)
    assert refused(cli, trained.path) == (
        "`mtrain serve` must have starlette: pip install 'mtrain[serve]' adds it."
    )
