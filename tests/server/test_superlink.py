"""What is used of Flower's inside still does what it did: these fail loudly when flwr moves."""

import threading
import time

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.client.fleet import Fleet
from coterie.client.node_config import public_pem
from coterie.core.protocol import HEARTBEAT_SECONDS
from coterie.server import superlink
from coterie.server.superlink import SuperLink

from ..commands import wait_for


@pytest.fixture(scope="module")
def link():
    made = SuperLink()
    server = uvicorn.Server(uvicorn.Config(made.fleet, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    made.port = server.servers[0].sockets[0].getsockname()[1]
    yield made
    server.should_exit = True
    thread.join()
    made.close()


@pytest.fixture
def node(link):
    key = ec.generate_private_key(ec.SECP384R1())
    node_id = link.register(public_pem(key), "site-a")
    fleet = Fleet(f"127.0.0.1:{link.port}", key, None)
    fleet.activate(HEARTBEAT_SECONDS)
    yield node_id, fleet
    link.unregister(node_id)
    fleet.close()


def test_a_message_goes_and_its_reply_comes_once_and_nothing_stays(link, node):
    node_id, fleet = node
    assert fleet.pull() is None
    for _ in range(3):
        message_id = link.push(node_id, "train", {"round": 3, "model": "ab" * 32, "share": 0.5})
        task = fleet.pull()
        assert (task.message_id, task.kind) == (message_id, "train")
        assert task.record == {"round": 3, "model": "ab" * 32, "share": 0.5}
        assert fleet.pull() is None
        assert link.pull({message_id}) == []
        fleet.reply(task, {"num_examples": 7})
        fleet.reply(task, {"num_examples": 7})
        (answer,) = link.pull({message_id})
        assert (answer.message_id, dict(answer.record), answer.error) == (message_id, {"num_examples": 7}, "")
        assert link.pull({message_id}) == []
        link.forget({message_id})
    assert link._state.object_store.store == {}
    assert link._state.num_message_ins() == link._state.num_message_res() == 0


def test_a_node_is_there_once_and_may_come_again_when_it_is_released(link, node):
    node_id, fleet = node
    assert fleet.heartbeat(HEARTBEAT_SECONDS)
    with pytest.raises(httpx.HTTPStatusError):
        fleet.activate(HEARTBEAT_SECONDS)
    link.release(node_id)
    fleet.activate(HEARTBEAT_SECONDS)


def test_who_is_not_registered_is_not_let_in(link):
    stranger = Fleet(f"127.0.0.1:{link.port}", ec.generate_private_key(ec.SECP384R1()), None)
    with pytest.raises(httpx.HTTPStatusError):
        stranger.activate(HEARTBEAT_SECONDS)
    stranger.close()


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/pull-messages", "/docs", "/openapi.json"])
def test_only_the_fleet_protocol_is_reachable(link, path):
    assert httpx.post(f"http://127.0.0.1:{link.port}{path}").status_code == 404


def test_a_node_that_has_not_said_hello_gets_no_message_yet(link):
    node_id = link.register(public_pem(ec.generate_private_key(ec.SECP384R1())), "site-b")
    assert link.push(node_id, "train", {"round": 1}) is None


def test_a_reply_is_announced_and_a_request_that_is_too_large_is_not_read(link, node):
    node_id, fleet = node
    announced = []
    link.replied = announced.append
    message_id = link.push(node_id, "train", {"round": 1})
    fleet.reply(fleet.pull(), {"num_examples": 7})
    wait_for(lambda: announced == [message_id], "the announcement")  # comes after the node has its answer
    assert len(link.pull({message_id})) == 1
    link.forget({message_id})
    assert link._state._object_push_sessions == {}
    url = f"http://127.0.0.1:{link.port}/v1/fleet/push-messages"
    assert httpx.post(url, content=b"x" * (superlink.MOST_BYTES + 1)).status_code == 413
    assert httpx.post(url, content=b"\xff" * 100).status_code >= 400
    assert announced == [message_id]
