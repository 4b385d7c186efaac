"""Calls of many threads are decoded in one batch, and each gets the same result as alone."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tasks import copy_task

from mtrain.decode import shared_search
from mtrain.decode import translator as translator_module
from mtrain.decode.beam import NUM_GROUPS, Hypothesis, NotFiniteError
from mtrain.decode.options import Sampling
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.shared_search import SearchCall, SearchLimits, SharedSearch, _Worker
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir

PATIENCE_S = 60
Draws = Generator[None, None, list[list[Hypothesis]]]
LINES = [pair.src for pair in copy_task(40, 5)]
TRANSLATE_IN_A_FORK = """
import os, sys
from pathlib import Path
from mtrain.decode import translator
from mtrain.decode.pipeline import translate_lines
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir

loaded = translator.load(RunDir(Path(sys.argv[1])), loading=LoadOptions("cpu"))
before = translate_lines(loaded, sys.argv[2:])
child = os.fork()
if child == 0:
    os._exit(translate_lines(loaded, sys.argv[2:]) != before)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(params=[1, 2], ids=["in the caller's thread", "in two threads"])
def translator(trained: RunDir, request: pytest.FixtureRequest) -> Iterator[Translator]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield translator_module.load(trained, loading=LoadOptions("cpu"))
    torch.set_num_threads(before)


def sources(translator: Translator, lines: list[str], length: int = 0) -> list[EncodedSource]:
    """Encode lines; the targets begin with `length` given tokens."""
    return [EncodedSource(ids, (5,) * length) for ids in translator.tokenizer.encode_src(lines)]


def wait_for_search_threads() -> None:
    """Wait until the threads of all searches have ended because nothing is left to decode."""
    for thread in threading.enumerate():
        if thread.name.startswith("search-"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def step_by_step(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each position be decoded by `Ensemble.step`."""
    monkeypatch.setattr(translator.model, "search_steps", lambda *arguments: None)


class Gate:
    """Blocks the first step of a search until it is opened; records the rows of every step."""

    def __init__(self, translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.others_may_step = threading.Event()  # other threads than the first
        self.others_may_step.set()
        self.num_rows: list[int] = []
        self.threads: set[int] = set()
        self.interrupt_at = -1
        step = translator.ensemble.step

        def held(ids_N: torch.Tensor, state: object) -> object:
            self.is_reached.set()
            assert self.is_open.wait(PATIENCE_S)
            if self.threads - {threading.get_ident()}:
                assert self.others_may_step.wait(PATIENCE_S)
            self.num_rows.append(len(ids_N))
            self.threads.add(threading.get_ident())
            if len(self.num_rows) == self.interrupt_at:
                raise KeyboardInterrupt
            return step(ids_N, state)

        monkeypatch.setattr(translator.ensemble, "step", held)
        step_by_step(translator, monkeypatch)

    def wait_for_load(self, translator: Translator, num_sources: int) -> None:
        """Wait until `num_sources` sources are queued or being decoded."""
        deadline = time.monotonic() + PATIENCE_S
        while translator.shared_search._workers[0].load() < num_sources:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("beam", [1, 4])
def test_many_threads_get_the_same_translations_together_as_alone(
    translator: Translator, beam: int
) -> None:
    num_threads = torch.get_num_threads()
    translator.options = replace(translator.options, beam=beam)
    alone = translate_lines(translator, LINES)
    start = threading.Barrier(8)

    def one_by_one(lines: list[str]) -> list[str]:
        start.wait(PATIENCE_S)
        return [translate_lines(translator, [line])[0] for line in lines]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one_by_one, [LINES[first::8] for first in range(8)]))
    assert together == [alone[first::8] for first in range(8)]
    wait_for_search_threads()
    assert torch.get_num_threads() == num_threads


def test_calls_made_during_a_search_are_admitted_to_the_running_batch(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    translator.options = replace(translator.options, beam=1)
    alone = translate_lines(translator, LINES[:4])
    gate = Gate(translator, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(translate_lines, translator, LINES[:1])
        assert gate.is_reached.wait(PATIENCE_S)
        others = [pool.submit(translate_lines, translator, [line]) for line in LINES[1:4]]
        gate.wait_for_load(translator, 4)
        gate.is_open.set()
        assert [future.result()[0] for future in (first, *others)] == alone
    assert gate.num_rows[:2] == [1, 4]


def test_a_decoding_caller_returns_when_its_own_call_ends_and_another_thread_continues(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    many = sources(translator, LINES[:3], length=50)
    alone = translator.search(many)
    gate = Gate(translator, monkeypatch)
    gate.others_may_step.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(translate_lines, translator, LINES[:1])
        assert gate.is_reached.wait(PATIENCE_S)
        long = pool.submit(translator.search, many)
        gate.wait_for_load(translator, 4)
        gate.is_open.set()
        first.result()
        assert not long.done()
        gate.others_may_step.set()
        assert long.result() == alone
    assert len(gate.threads) == 2


def test_a_caller_with_one_core_decodes_in_its_own_thread(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    gate = Gate(translator, monkeypatch)
    gate.is_open.set()
    translate_lines(translator, LINES)
    assert gate.threads == {threading.get_ident()}


def test_an_interrupt_of_the_decoding_caller_does_not_affect_the_other_call(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    alone = translator.search(sources(translator, LINES))
    gate = Gate(translator, monkeypatch)
    gate.interrupt_at = 3
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(translator.search, sources(translator, LINES))
        assert gate.is_reached.wait(PATIENCE_S)
        second = pool.submit(translator.search, sources(translator, LINES))
        gate.wait_for_load(translator, 2 * len(LINES))
        gate.is_open.set()
        with pytest.raises(KeyboardInterrupt):
            first.result()
        assert second.result() == alone
    assert translator.search(sources(translator, LINES)) == alone


def test_a_long_call_does_not_keep_a_short_one_waiting(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    many = sources(translator, LINES * 3, length=100)
    cells = max(len(source.ids) for source in many) * 5 * NUM_GROUPS
    translator.options = replace(translator.options, beam=1, batch_tokens=cells)
    gate = Gate(translator, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(translator.search, many)
        assert gate.is_reached.wait(PATIENCE_S)
        short = pool.submit(translator.search, sources(translator, LINES[:1]))
        gate.is_open.set()
        assert len(short.result(PATIENCE_S)) == 1
        num_steps = len(gate.num_rows)
        assert len(long.result()) == len(many)
    assert num_steps < 250 < len(gate.num_rows)


def test_samples_that_are_drawn_side_by_side_fit_into_batch_tokens(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    own, num_samples = sources(translator, LINES), 40
    budget = max(len(source.ids) for source in own) * num_samples * 2 * NUM_GROUPS
    now_and_most = [0, 0]  # source positions times samples
    sample = Translator._sample

    def counted(self: Translator, group: list[EncodedSource]) -> Draws:
        size = max(len(source.ids) for source in group) * len(group) * num_samples
        now_and_most[0] += size
        now_and_most[1] = max(now_and_most)
        result = yield from sample(self, group)
        now_and_most[0] -= size
        return result

    monkeypatch.setattr(Translator, "_sample", counted)
    options = replace(translator.options, sampling=Sampling(), num_best=num_samples)
    translator.with_options(replace(options, batch_tokens=budget)).search(own)
    assert now_and_most[0] == 0
    assert budget / 2 < now_and_most[1] <= budget


def test_a_timeout_or_cancellation_ends_only_its_own_call(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = translate_lines(translator, LINES[:2])
    gate = Gate(translator, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(translate_lines, translator, LINES[:2])
        assert gate.is_reached.wait(PATIENCE_S)
        many = sources(translator, LINES, length=200)
        soon = SearchLimits(time.monotonic() + 0.05)
        with pytest.raises(TimeoutError):
            translator.with_options(translator.options, soon).search(many)
        cancelled = SearchLimits(cancel=threading.Event())
        threading.Timer(0.05, cancelled.cancel.set).start()
        threading.Timer(0.1, gate.is_open.set).start()  # limits are checked between positions
        with pytest.raises(CancelledError):
            translator.with_options(translator.options, cancelled).search(many)
        assert patient.result() == alone
    wait_for_search_threads()
    assert len(gate.num_rows) < 100, "the targets of 200 tokens were not decoded to their end"
    assert translate_lines(translator, LINES[:2]) == alone
    # a worker keeps the last call until the next one
    assert {len(worker._calls) for worker in translator.shared_search._workers} <= {0, 1}


def test_an_error_ends_only_the_call_that_caused_it(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = translate_lines(translator, LINES[:1])
    start = Translator._start

    def picky(self: Translator, group: list[EncodedSource]) -> object:
        if len(group) > 1:
            raise ValueError("more than one")
        return start(self, group)

    monkeypatch.setattr(Translator, "_start", picky)
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(translator.search, sources(translator, LINES))
        good = pool.submit(translate_lines, translator, LINES[:1])
        assert good.result() == alone
        with pytest.raises(ValueError, match="more than one"):
            bad.result()


def test_concurrent_searches_with_different_options_give_the_same_as_alone(
    translator: Translator,
) -> None:
    greedy = translate_lines(translator.with_options(replace(translator.options, beam=1)), LINES)
    wide = translate_lines(translator.with_options(replace(translator.options, beam=6)), LINES)
    drawn = replace(translator.options, sampling=Sampling(), num_best=2)
    sampled = translate_lines(translator.with_options(drawn), LINES)
    all_options = [replace(translator.options, beam=beam) for beam in (1, 6)] + [drawn]
    with ThreadPoolExecutor(3) as pool:
        searching = [translator.with_options(options) for options in all_options]
        found = list(pool.map(lambda each: translate_lines(each, LINES), searching))
    assert found == [greedy, wide, sampled]


def test_every_decoding_step_uses_one_thread_and_the_caller_keeps_its_thread_count(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    step = translator.ensemble.step

    def counted(ids_N: torch.Tensor, state: object) -> object:
        counts.append(torch.get_num_threads())
        return step(ids_N, state)

    monkeypatch.setattr(translator.ensemble, "step", counted)
    step_by_step(translator, monkeypatch)
    num_threads = torch.get_num_threads()
    for _ in range(5):
        translate_lines(translator, LINES)
        wait_for_search_threads()
        assert torch.get_num_threads() == num_threads
    assert set(counts) == {1}


def test_a_forked_process_gives_the_same_translations(trained: RunDir) -> None:
    command = [sys.executable, "-W", "ignore", "-c", TRANSLATE_IN_A_FORK, str(trained.path)]
    subprocess.run([*command, *LINES[:3]], check=True, timeout=PATIENCE_S * 4, env=os.environ)


def test_a_large_group_is_overtaken_by_smaller_groups_only_a_limited_number_of_times(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A running search with room for one source."""

        owners = ()

        def has_room(self, call: SearchCall, rows: list[int]) -> bool:
            return len(rows) == 1

    monkeypatch.setattr(shared_search, "_MAX_PASSED", 3)
    worker: _Worker = _Worker(lambda ids, state: ids, None, 0)
    worker._is_running = True  # so that it starts no thread
    worker._searches[translator.options] = Full()
    (one,) = sources(translator, ["ba"])
    large: SearchCall = SearchCall({0: one, 1: one}, translator.options, translator._start)
    worker.submit(large, [[0, 1]])
    for _ in range(5):
        worker.submit(SearchCall({0: one}, translator.options, translator._start), [[0]])
    admitted = [worker._next_group() for _ in range(5)]
    assert [group is not None and group[1] for group in admitted] == [[0], [0], [0], False, False]
    Full.has_room = lambda self, call, rows: True  # type: ignore[method-assign]
    assert worker._next_group() == (large, [0, 1])


def test_nan_logits_end_the_call_with_an_error(translator: Translator) -> None:
    def lost(ids_N: torch.Tensor, state: object) -> torch.Tensor:
        return torch.full((len(ids_N), 20), torch.nan)

    shared, group = SharedSearch(lost), sources(translator, ["ba"])
    for _ in range(2):
        call: SearchCall = SearchCall({0: group[0]}, translator.options, translator._start)
        wait = shared.submit(call, [[[0]]])
        with pytest.raises(NotFiniteError):
            wait()


@pytest.mark.parametrize("sampling", [None, Sampling()], ids=["beam", "sampling"])
def test_an_error_of_a_decoding_step_ends_its_call_and_no_later_one(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, sampling: Sampling | None
) -> None:
    decoder = translator.with_options(replace(translator.options, sampling=sampling))
    group = sources(translator, LINES[:3])
    expected = decoder.search(group)

    def failing(ids_N: torch.Tensor, state: object) -> object:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(translator.ensemble, "step", failing)
        step_by_step(translator, patch)
        with pytest.raises(RuntimeError, match="no memory is left"):
            decoder.search(group)
    wait_for_search_threads()
    assert not any(worker.load() for worker in translator.shared_search._workers)
    assert decoder.search(group) == expected


def test_waiting_groups_are_encoded_in_one_batch_and_an_encoding_error_ends_only_its_call(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    alone = [translate_lines(translator, [line]) for line in LINES[:4]]
    gate = Gate(translator, monkeypatch)
    start, num_started = Translator._start, []

    def noted(self: Translator, group: list[EncodedSource]) -> object:
        num_started.append(len(group))
        if any(source.seed == 3 for source in group):
            raise ValueError("the seed is 3")
        return start(self, group)

    monkeypatch.setattr(Translator, "_start", noted)
    bad = [replace(source, seed=3) for source in sources(translator, LINES[:1])]
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(translate_lines, translator, LINES[:1])
        assert gate.is_reached.wait(PATIENCE_S)
        others = [pool.submit(translate_lines, translator, [line]) for line in LINES[1:4]]
        gate.wait_for_load(translator, 4)
        gate.is_open.set()
        assert [future.result() for future in (first, *others)] == alone
        assert num_started == [1, 3]
        num_started.clear()
        gate.is_reached.clear()
        gate.is_open.clear()
        first = pool.submit(translate_lines, translator, LINES[:1])
        assert gate.is_reached.wait(PATIENCE_S)
        failing = pool.submit(translator.search, bad)
        other = pool.submit(translate_lines, translator, LINES[1:2])
        gate.wait_for_load(translator, 3)
        gate.is_open.set()
        assert [first.result(), other.result()] == alone[:2]
        with pytest.raises(ValueError, match="the seed is 3"):
            failing.result()
    assert num_started == [1, 2, 1, 1]


def test_sampling_and_beam_search_run_concurrently_and_sampling_can_be_cancelled(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short call returns long before the sampling that started first."""
    torch.set_num_threads(1)
    drawn = replace(translator.options, sampling=Sampling(), num_best=2)
    sampling = translator.with_options(drawn)
    many = sources(translator, LINES[:4], length=200)
    alone, expected = sampling.search(many), translate_lines(translator, LINES[:1])
    gate = Gate(translator, monkeypatch)
    cancelled = SearchLimits(cancel=threading.Event())
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(sampling.search, many)
        assert gate.is_reached.wait(PATIENCE_S)
        short = pool.submit(translate_lines, translator, LINES[:1])
        lost = pool.submit(translator.with_options(drawn, cancelled).search, many)
        gate.wait_for_load(translator, 9)
        cancelled.cancel.set()
        gate.is_open.set()
        with pytest.raises(CancelledError):
            lost.result()
        assert short.result(PATIENCE_S) == expected
        assert len(gate.num_rows) < 100
        assert long.result() == alone
    assert 200 < len(gate.num_rows) < 300, "the samples that were cancelled were not drawn"


def test_a_call_made_after_most_of_a_group_has_finished_gives_the_same_as_alone(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    translator.options = replace(translator.options, beam=1)
    group = sources(translator, LINES[:3]) + sources(translator, LINES[:1], length=100)
    alone, line = translator.search(group), translate_lines(translator, LINES[4:5])
    is_reached, is_open, num_steps = threading.Event(), threading.Event(), 0
    step = translator.ensemble.step

    def held(ids_N: torch.Tensor, state: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 60:
            is_reached.set()
            assert is_open.wait(PATIENCE_S)
        return step(ids_N, state)

    monkeypatch.setattr(translator.ensemble, "step", held)
    step_by_step(translator, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(translator.search, group)
        assert is_reached.wait(PATIENCE_S)
        second = pool.submit(translate_lines, translator, LINES[4:5])
        deadline = time.monotonic() + PATIENCE_S
        while translator.shared_search._workers[0].load() < 2:
            assert time.monotonic() < deadline
        is_open.set()
        assert (first.result(), second.result()) == (alone, line)


def test_a_deadline_later_than_a_thread_can_wait_is_no_error(translator: Translator) -> None:
    expected = translate_lines(translator, LINES)
    translator.limits = SearchLimits(time.monotonic() + 2 * threading.TIMEOUT_MAX)
    assert translate_lines(translator, LINES) == expected
    wait_for_search_threads()


def test_a_search_thread_that_cannot_start_fails_its_call_and_no_later_one(
    trained: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # so that a call is decoded in threads of the search
    try:
        translator = translator_module.load(trained, loading=LoadOptions("cpu"))
        start = threading.Thread.start

        def fail(thread: threading.Thread) -> None:
            if thread.name.startswith("search-"):
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                translate_lines(translator, LINES)
        assert [worker.load() for worker in translator.shared_search._workers] == [0, 0]
        translator.limits = SearchLimits(time.monotonic() + PATIENCE_S)
        assert len(translate_lines(translator, LINES)) == len(LINES)
        wait_for_search_threads()
    finally:
        torch.set_num_threads(before)
