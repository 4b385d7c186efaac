"""Compare the speed and latency of `mtrain serve` and of CTranslate2 behind a minimal server.

    python benchmarks/serve_load.py RUN LINES              # at 1, 8 and 64 clients
    python benchmarks/serve_load.py RUN LINES --clients 64 --rounds 5 --seconds 10
    python benchmarks/serve_load.py RUN LINES --beside libretranslate=5001
    python benchmarks/serve_load.py RUN LINES --overload 600    # mtrain, at twice its rate

Both servers have the same weights in float32, the same beam and the same cores, and are asked in
turn by the same clients, each over one connection, one line of the file LINES at a time. The other
server is Python's own `ThreadingHTTPServer` with a pool of CTranslate2 that has a thread a core.
`--beside` names a third server that already runs, and its port on 127.0.0.1.
Prints the median of each figure over the rounds, and of the ratio within each round.

With `--overload`, requests come at twice the rate that the server has just shown it can carry,
whether it keeps up or not. Each must be answered with the translation that its line has alone or
with 503, and the server's memory must not grow. The exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from machine import resident_mib  # noqa: E402 - of this folder

PERCENTILES = (50, 95, 99)
MAX_LINES = 200  # of an overload, each of which is translated alone first
MAX_GROWTH_MIB = 100  # from the first tenth of an overload to its end
OVERLOAD_CLIENTS = 400


class Load(NamedTuple):
    """What a round measured: sentences a second, and percentiles of the latency in ms."""

    per_second: float
    latencies_ms: list[float]


def serve_thinly(run: Path, beam: int) -> None:
    """Serve CTranslate2's copy of a run until the process is ended."""
    import ctranslate2

    from mtrain import api
    from mtrain.decode.pipeline import translate_lines

    model = api.load(run, beam=beam, engine="ctranslate2")
    tokenizer = model.translator.tokenizer
    threads = os.cpu_count() or 1
    pool = ctranslate2.Translator(
        str(run / "ctranslate2"), inter_threads=threads, intra_threads=1, compute_type="float32"
    )
    assert translate_lines(model.translator, ["a"])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: two would wait for each other

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pieces = tokenizer.src.pieces(body["q"])
            (result,) = pool.translate_batch([pieces], beam_size=beam)
            text = tokenizer.tgt.text_of(result.hypotheses[0])
            content = json.dumps({"translatedText": text}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024

    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/", file=sys.stderr, flush=True)
        server.serve_forever()


def start(command: list[str]) -> tuple[subprocess.Popen[str], int]:
    """Start a server; return its process and port."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.match(r"http://127\.0\.0\.1:(\d+)/", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(found[1])
    raise SystemExit(f"{command}: no address")


def ask(
    port: int, lines: list[str], languages: dict[str, str], clients: int, seconds: float
) -> Load:
    """Let clients ask for `seconds`, each over one connection."""
    latencies: list[float] = []
    rows = itertools.count()
    end = time.monotonic() + seconds

    def run_client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while (began := time.monotonic()) < end:
            body = json.dumps({"q": lines[next(rows) % len(lines)], **languages})
            connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            latencies.append(1000 * (time.monotonic() - began))

    threads = [threading.Thread(target=run_client) for _ in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Load(len(latencies) / (time.monotonic() - began), sorted(latencies))


def overload(
    process: subprocess.Popen[str],
    port: int,
    lines: list[str],
    languages: dict[str, str],
    seconds: float,
) -> bool:
    """Ask at twice the rate that the server can carry; print what came of it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    alone = {line: translate(connection, line, languages)[1] for line in lines[:MAX_LINES]}
    per_second = 2 * ask(port, list(alone), languages, 64, min(10.0, seconds)).per_second
    lines, counts, latencies = list(alone), Counter[str](), list[float]()
    lock, numbers, began = threading.Lock(), itertools.count(), time.monotonic()

    def run_client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while (number := next(numbers)) < seconds * per_second:
            time.sleep(max(0.0, began + number / per_second - time.monotonic()))
            line, sent_s = lines[number % len(lines)], time.monotonic()
            try:
                status, text = translate(connection, line, languages)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                status, text = 0, f"{type(error).__name__}: {error}"
            is_right = status == 503 or (status == 200 and text == alone[line])
            with lock:
                counts[str(status) if is_right else f"wrong: {status} {text[:60]}"] += 1
                if status == 200:
                    latencies.append(1000 * (time.monotonic() - sent_s))

    threads = [threading.Thread(target=run_client) for _ in range(OVERLOAD_CLIENTS)]
    for thread in threads:
        thread.start()
    memory_mib = []
    for _ in range(10):
        time.sleep(seconds / 10)
        memory_mib.append(resident_mib(process.pid))
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began
    print(f"{counts.total():,} requests in {took_s:,.0f} s, {per_second:,.1f}/s were to come")
    for answer, number in counts.most_common():
        print(f"{number:9,}  {answer}")
    latencies.sort()
    shown = (f"p{share} {percentile(latencies, share):,.0f} ms" for share in PERCENTILES)
    print(f"answered by a translation: {', '.join(shown)}")
    shown = (f"{each:,.0f}" for each in memory_mib)
    print(f"memory of the server in MiB, after each tenth: {' '.join(shown)}")
    connection.close()  # idle for too long, it may have been closed by the server
    is_alive = translate(connection, lines[0], languages)[1] == alone[lines[0]]
    has_grown = memory_mib[-1] > memory_mib[0] + MAX_GROWTH_MIB
    return set(counts) <= {"200", "503"} and not has_grown and is_alive


def translate(
    connection: http.client.HTTPConnection, line: str, languages: dict[str, str]
) -> tuple[int, str]:
    """Ask once; return the status and the translation."""
    body = json.dumps({"q": line, **languages})
    connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, str(json.loads(response.read()).get("translatedText"))


def percentile(ordered: list[float], share: int) -> float:
    """Return the value below which `share` percent of ordered values lie."""
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def main() -> None:
    """Measure, and print a line for each server and number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--beside", metavar="NAME=PORT", action="append", default=[])
    parser.add_argument("--overload", type=float, metavar="SECONDS", default=0.0)
    parser.add_argument("--thin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.thin:
        serve_thinly(options.run, options.beam)
        return
    from mtrain.run.run_dir import RunDir

    data = RunDir(options.run).config.data
    languages = {"source": data.src_lang, "target": data.tgt_lang}
    lines = options.lines.read_text(encoding="utf-8").splitlines()
    python, run = sys.executable, str(options.run)
    beam = ["--beam", str(options.beam)]
    ours = start([python, "-m", "mtrain", "serve", run, "--port", "0", *beam])
    if options.overload:
        try:
            is_sound = overload(*ours, lines, languages, options.overload)
        finally:
            ours[0].terminate()
        sys.exit(not is_sound)
    thin = start([python, __file__, run, str(options.lines), "--thin", *beam])
    ports = {"mtrain": ours[1], "ctranslate2": thin[1]}
    for each in options.beside:
        name, _, port = each.partition("=")
        ports[name] = int(port)
    try:
        for port in ports.values():
            ask(port, lines, languages, 4, 1.0)
        for clients in options.clients:
            compare(ports, lines, languages, clients, options)
    finally:
        for process in (ours[0], thin[0]):
            process.terminate()


def compare(
    ports: dict[str, int],
    lines: list[str],
    languages: dict[str, str],
    clients: int,
    options: argparse.Namespace,
) -> None:
    """Ask all servers in turn; print a line for each, and the ratios of mtrain to the others."""
    loads: dict[str, list[Load]] = {name: [] for name in ports}
    for _ in range(options.rounds):
        for name, port in ports.items():
            loads[name].append(ask(port, lines, languages, clients, options.seconds))
    for name, rounds in loads.items():
        rate = statistics.median(each.per_second for each in rounds)
        shown = f"{clients:3} clients  {name:<15} {rate:8,.1f} sentences/s"
        for share in PERCENTILES:
            times = (percentile(each.latencies_ms, share) for each in rounds)
            shown += f"  p{share} {statistics.median(times):,.0f} ms"
        if name != "mtrain":
            pairs = zip(loads["mtrain"], rounds, strict=True)
            ratio = statistics.median(ours.per_second / other.per_second for ours, other in pairs)
            shown += f"  mtrain makes {ratio:.2f} times as many"
        print(shown, flush=True)


if __name__ == "__main__":
    main()
