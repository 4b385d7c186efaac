"""Signals that stop a training."""

import signal
from typing import Any

import pytest

from mtrain.runtime.signals import Signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_with_may_repeat_the_first_of_several_signals_is_recorded(first: signal.Signals) -> None:
    with Signals(may_repeat=True) as signals:
        assert signals.received == 0
        for number in (first, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.received == first


def test_a_signal_while_the_handlers_are_installed_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install, before = signal.signal, signal.getsignal(signal.SIGINT)

    def install_and_raise(number: int, handler: Any) -> Any:
        replaced = install(number, handler)
        if number == signal.SIGINT and handler is not before:
            signal.raise_signal(signal.SIGINT)
        return replaced

    monkeypatch.setattr(signal, "signal", install_and_raise)
    with Signals() as signals:
        assert signals.received == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
