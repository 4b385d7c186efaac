"""A thread pool returns the results in order, as one thread would, and propagates errors."""

import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Logged
from torch import Tensor

from mtrain.runtime import threads
from mtrain.runtime.threads import ThreadPool, map_on_cores

PATIENCE_S = 60


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Set PyTorch to three threads on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workers(num_threads: None) -> Iterator[ThreadPool]:
    made = ThreadPool()
    yield made
    made.close()


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_there_are_as_many_workers_as_pytorch_has_threads(workers: ThreadPool) -> None:
    assert workers.count == 3
    together = threading.Barrier(3)
    found = workers.map(lambda _: together.wait(PATIENCE_S), range(3))
    assert sorted(found) == [0, 1, 2], "three were there at one time"


def test_results_are_in_the_order_of_the_tasks_even_if_a_later_task_ends_first(
    workers: ThreadPool,
) -> None:
    second_is_done = threading.Event()

    def square(task: int) -> int:
        if task == 0:
            assert second_is_done.wait(PATIENCE_S)
        second_is_done.set()
        return task * task

    assert workers.map(square, range(10)) == [task * task for task in range(10)]


def test_each_worker_uses_one_torch_thread_and_the_caller_keeps_its_thread_count(
    workers: ThreadPool,
) -> None:
    assert workers.map(lambda _: torch.get_num_threads(), range(6)) == [1] * 6
    assert torch.get_num_threads() == 3


def test_a_single_task_runs_in_the_callers_thread_with_all_torch_threads(
    workers: ThreadPool,
) -> None:
    here = threading.get_ident()
    assert workers.map(lambda _: (torch.get_num_threads(), threading.get_ident()), [0]) == [
        (3, here)
    ]


def test_with_one_torch_thread_all_tasks_run_in_the_callers_thread(
    num_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    workers, here = ThreadPool(), threading.get_ident()
    assert workers.count == 1
    assert workers.map(lambda _: threading.get_ident(), range(3)) == [here] * 3
    workers.close()


def test_an_empty_list_of_tasks_gives_an_empty_list_of_results(workers: ThreadPool) -> None:
    assert workers.map(lambda task: task, []) == []
    assert torch.get_num_threads() == 3


def fail_at_two(task: int) -> int:
    if task == 2:
        raise ZeroDivisionError("this task has gone wrong")
    return task


def test_an_error_is_propagated_with_its_traceback_and_the_workers_continue(
    workers: ThreadPool,
) -> None:
    with pytest.raises(ZeroDivisionError, match="this task has gone wrong") as error:
        workers.map(fail_at_two, range(4))
    frames = traceback.extract_tb(error.value.__traceback__)
    assert (frames[-1].filename, frames[-1].name) == (__file__, "fail_at_two")
    assert torch.get_num_threads() == 3
    assert workers.map(fail_at_two, [5, 6, 7]) == [5, 6, 7], "the workers are still there"


def test_tasks_compute_gradients_independently_of_each_other(workers: ThreadPool) -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)

    def gradient(power: int) -> Tensor:
        return torch.autograd.grad(weight.pow(power).sum(), weight)[0]

    found = workers.map(gradient, [1, 2, 3])
    assert [grad.tolist() for grad in found] == [[1.0, 1.0], [4.0, 6.0], [12.0, 27.0]]
    assert weight.grad is None


def test_closing_the_pool_ends_its_threads(num_threads: None) -> None:
    before = names()
    workers = ThreadPool()
    workers.map(lambda task: task, range(3))
    assert any(name.startswith("update") for name in names() - before)
    workers.close()
    workers.close()
    assert names() == before


def test_map_on_cores_runs_each_task_in_a_new_thread_on_one_core(num_threads: None) -> None:
    before = names()
    together = threading.Barrier(3)

    def task(number: int) -> tuple[int, int, int]:
        together.wait(PATIENCE_S)
        return number, torch.get_num_threads(), threading.get_ident()

    found = map_on_cores(task, range(6))
    assert [(number, count) for number, count, _ in found] == [(number, 1) for number in range(6)]
    assert threading.get_ident() not in {thread for *_, thread in found}
    assert (torch.get_num_threads(), names()) == (3, before)


def test_map_on_cores_runs_a_single_task_on_one_core_too(num_threads: None) -> None:
    assert map_on_cores(lambda _: torch.get_num_threads(), [0]) == [1]
    assert map_on_cores(lambda task: task, []) == []
    torch.set_num_threads(1)
    here = threading.get_ident()
    assert map_on_cores(lambda _: threading.get_ident(), [0, 1]) == [here, here]


def test_map_on_cores_propagates_the_first_error(num_threads: None) -> None:
    with pytest.raises(ZeroDivisionError, match="this task has gone wrong"):
        map_on_cores(fail_at_two, range(4))
    assert torch.get_num_threads() == 3


def test_a_thread_that_starts_meanwhile_does_not_take_over_one_core(num_threads: None) -> None:
    counts: list[int] = []
    started = threading.Thread(target=lambda: counts.append(threads.num_threads()))
    set_num_threads = torch.set_num_threads

    def start_another(count: int) -> None:
        set_num_threads(count)
        if count == 1 and started.ident is None:
            started.start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads.torch, "set_num_threads", start_another)
        map_on_cores(lambda task: task, [0])
    started.join()
    assert counts == [3]


def test_map_on_cores_raises_the_error_of_a_thread_that_cannot_start(
    num_threads: None, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    start, started, get_num_threads = threading.Thread.start, [], torch.get_num_threads

    def get_late() -> int:
        if threading.current_thread() in started:
            time.sleep(0.1)  # it uses one core after the error of the other
        return get_num_threads()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    counts: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        patch.setattr(threads.torch, "get_num_threads", get_late)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            map_on_cores(lambda task: task, range(3))
    later = threading.Thread(target=lambda: counts.append(threads.num_threads()))
    later.start()
    later.join()
    assert (torch.get_num_threads(), counts) == (3, [3])
    assert logged.records == []


def test_an_interrupt_while_the_threads_of_map_on_cores_start_cancels_the_tasks(
    num_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    set_num_threads, shutdown = torch.set_num_threads, ThreadPoolExecutor.shutdown
    may_end = threading.Event()

    def interrupt(count: int) -> None:
        set_num_threads(count)
        if count == 3:
            raise KeyboardInterrupt

    def task(number: int) -> None:
        assert may_end.wait(PATIENCE_S)
        done.append(number)

    def end(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not cancel_futures:
            may_end.set()
        shutdown(pool, wait, cancel_futures=cancel_futures)
        may_end.set()

    monkeypatch.setattr(threads.torch, "set_num_threads", interrupt)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    with pytest.raises(KeyboardInterrupt):
        map_on_cores(task, range(60))
    assert len(done) <= 3  # those that had begun
