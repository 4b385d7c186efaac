"""Signals that stop a training."""

import signal

import pytest

from mtrain.runtime.signals import Signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_with_may_repeat_the_first_of_several_signals_is_recorded(first: signal.Signals) -> None:
    with Signals(may_repeat=True) as signals:
        assert signals.received == 0
        for number in (first, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.received == first
