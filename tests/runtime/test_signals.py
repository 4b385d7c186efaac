"""Signals that stop a training."""

import signal

import pytest

from mtrain.runtime.signals import Signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_of_signals_that_may_be_repeated_the_first_one_is_received(first: signal.Signals) -> None:
    with Signals(may_repeat=True) as signals:
        assert signals.received == 0
        for number in (first, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.received == first
