"""Networks that fail: what was on its way arrives later, counts once, and changes no bit."""

import contextlib
import socket
import threading
import time

import pytest

from ..commands import wait_for
from .test_federation import SETTINGS, SITES, TASK, reasons


class Proxy:
    """Forwards TCP to a port of this machine; `cut` breaks every connection and takes no new one until `mend`."""

    def __init__(self, port):
        self.target = port
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.open, self.is_cut = [], False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self.is_cut = True
        for one in self.open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.open.clear()

    def mend(self):
        self.is_cut = False

    def _accept(self):
        while True:
            here, _ = self.listening.accept()
            if self.is_cut:
                here.close()
                continue
            there = socket.create_connection(("127.0.0.1", self.target))
            self.open += [here, there]
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.close()


@pytest.mark.chaos
def test_cut_again_and_again_the_run_ends_with_the_same_bits(fed, simulated):
    fed.start("--insecure")
    proxy = Proxy(fed.port)
    sites = [fed.site(name, TASK.format(name), port=proxy.port) for name in SITES]
    watching = fed.submit(rounds=30, **SETTINGS)
    for done in (3, 8, 14, 20):
        wait_for(lambda done=done: fed.rounds_done() >= done, f"{done} rounds", 120)
        proxy.cut()
        time.sleep(0.7)
        proxy.mend()
    result = fed.result(watching)
    assert result["rounds"] == 30
    assert result["model"]["sha256"] == simulated(30, 2)
    assert reasons(fed) == []
    assert all("no connection" in site.said() for site in sites)
