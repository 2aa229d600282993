"""Updates that are cut on their way go on where they were cut, and count when they are whole."""

import asyncio
import hashlib

import pytest

from coterie.server import exchange as module
from coterie.server.exchange import Exchange, ExchangeError

UPDATE = bytes(range(256)) * 4


@pytest.fixture
def exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
    made = Exchange(tmp_path / "exchange")
    made.expect("m1", "site-a", len(UPDATE), lambda message_id: None)
    return made


async def pieces(data, cut=None):
    for start in range(0, len(data), 64):
        if cut is not None and start >= cut:
            raise ConnectionError("cut")
        yield data[start : start + 64]


def bring(exchange, message_id="m1", start=0, cut=None, data=UPDATE):
    return asyncio.run(exchange.receive(message_id, "site-a", pieces(data[start:], cut), start))


def test_a_cut_upload_goes_on_where_it_was_cut(exchange):
    with pytest.raises(ConnectionError):
        bring(exchange, cut=500)
    here = exchange.received("m1", "site-a")
    assert 300 <= here <= 512
    with pytest.raises(ExchangeError, match="the update did not come"):
        exchange.update("m1", "")
    digest = bring(exchange, start=here)
    assert digest == hashlib.sha256(UPDATE).hexdigest()
    assert exchange.update("m1", digest).read_bytes() == UPDATE


def test_what_has_come_is_kept_when_the_same_is_asked_anew(exchange):
    with pytest.raises(ConnectionError):
        bring(exchange, cut=500)
    exchange.expect("m2", "site-a", len(UPDATE), lambda message_id: None, instead_of="m1")
    with pytest.raises(ExchangeError, match="nobody waits"):
        exchange.received("m1", "site-a")
    here = exchange.received("m2", "site-a")
    assert here >= 300
    assert exchange.update("m2", bring(exchange, "m2", here)).read_bytes() == UPDATE
    exchange.drop("m2")
    assert not any(exchange._updates.iterdir())


def test_beginning_again_and_a_gap(exchange):
    with pytest.raises(ConnectionError):
        bring(exchange, cut=500)
    with pytest.raises(ExchangeError, match=r"byte 900 cannot be next: \d+ bytes of this update are here"):
        bring(exchange, start=900)
    assert exchange.update("m1", bring(exchange)).read_bytes() == UPDATE


def test_the_newest_request_brings_the_update(exchange):
    async def both():
        gate = asyncio.Event()

        async def slow():
            yield b"x" * 200
            await gate.wait()
            yield b"x" * (len(UPDATE) - 200)

        first = asyncio.create_task(exchange.receive("m1", "site-a", slow()))
        while exchange.received("m1", "site-a") == 0:
            await asyncio.sleep(0.001)
        digest = await exchange.receive("m1", "site-a", pieces(UPDATE))
        gate.set()
        with pytest.raises(ExchangeError, match="another request brings this update"):
            await first
        return digest

    assert exchange.update("m1", asyncio.run(both())).read_bytes() == UPDATE


def test_an_update_of_a_wrong_size_leaves_nothing(exchange):
    for data in (UPDATE[:-1], UPDATE + b"x"):
        with pytest.raises(ExchangeError, match=f"the update has {len(data)} bytes, the model asks for {len(UPDATE)}"):
            bring(exchange, data=data)
        assert not any(exchange._updates.iterdir())
