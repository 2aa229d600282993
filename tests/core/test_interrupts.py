"""Signals are kept back until a place where they may come, never lost there, and never for good."""

import os
import signal
import threading

import pytest

from coterie.core.interrupts import allowed, deferred


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_its_place(sig):
    done = []
    with deferred():
        os.kill(os.getpid(), sig)
        done.append("the transaction")
        with pytest.raises(KeyboardInterrupt), allowed():
            done.append("more waiting")
    assert done == ["the transaction"]


def send(count):
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGINT)


def test_in_its_place_it_comes_at_once():
    with deferred(), pytest.raises(KeyboardInterrupt), allowed():
        send(1)


def test_the_third_signal_is_not_kept_back():
    with deferred():
        send(2)
        with pytest.raises(KeyboardInterrupt):
            send(1)


def test_afterwards_everything_is_as_before():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with deferred(), deferred(), allowed():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_changes():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with deferred(), allowed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
