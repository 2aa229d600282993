"""The HTTP interface in front of the real parts: who is let in, what is refused, and that nothing breaks it."""

import base64
import json
import time

import hypothesis.strategies as st
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings

from coterie.core import protocol
from coterie.server.api import make_api, operator_token
from coterie.server.federation import Federation

TOKEN = "the-operators-token"
OPERATOR = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("home"), "-")
    yield made
    made.superlink.close()
    made.store.close()


@pytest.fixture(scope="module")
def client(federation):
    with TestClient(make_api(federation, TOKEN), raise_server_exceptions=False) as one:
        yield one


class Node:
    def __init__(self, client, federation, name):
        self.client, self.name, self.key = client, name, ec.generate_private_key(ec.SECP384R1())
        secret = federation.enrolment.new(name, rotate=True).partition(".")[0]
        body = {"secret": secret, "public_key": self.pem}
        assert client.post("/api/v1/nodes/enrol", json=body).json() == {"name": name}

    @property
    def pem(self):
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return self.key.public_key().public_bytes(*form).decode()

    def open(self, key=None, off=0.0, instance="one", body=None, speaks=protocol.VERSION):
        said = {"public_key": self.pem, "timestamp": time.time() + off, "instance": instance, "offers": {"t": 5}}
        body = body or json.dumps(said | {"version": "1", "protocol": speaks}).encode()
        signature = base64.b64encode((key or self.key).sign(body, ec.ECDSA(hashes.SHA256()))).decode()
        answer = self.client.post("/api/v1/nodes/session", content=body, headers={"x-coterie-signature": signature})
        return answer, body

    def session(self):
        return {"authorization": f"Bearer {self.open()[0].json()['token']}"}


@pytest.fixture
def node(client, federation):
    return Node(client, federation, "site-a")


def test_only_the_operator_operates(client):
    assert client.get("/api/v1/runs").status_code == 401
    assert client.get("/api/v1/runs", headers={"authorization": "Bearer another"}).status_code == 403
    assert client.get("/api/v1/runs", headers=OPERATOR).json() == []
    assert client.get("/api/v1/runs/none", headers=OPERATOR).status_code == 404
    refused = client.post("/api/v1/runs", json={"config": "roundz = 3"}, headers=OPERATOR)
    assert refused.status_code == 400
    assert "did you mean 'rounds'?" in refused.json()["detail"]


def test_a_session_needs_the_key_a_clock_and_a_request_of_its_own(node):
    answer, body = node.open()
    assert answer.status_code == 200
    assert node.open(body=body)[0].json()["detail"] == "this request has been seen before"
    assert "the signature does not fit" in node.open(key=ec.generate_private_key(ec.SECP384R1()))[0].json()["detail"]
    assert "clock is" in node.open(off=-4000.0)[0].json()["detail"]
    assert "clock is" in node.open(off=float("nan"))[0].json()["detail"]


def test_a_revoked_node_and_its_session_are_out(client, federation):
    node = Node(client, federation, "site-r")
    session = node.session()
    assert client.get("/api/v1/nodes/wake?seen=-1", headers=session).status_code == 200
    client.post("/api/v1/nodes/site-r/revoke", headers=OPERATOR)
    assert client.get("/api/v1/nodes/wake?seen=-1", headers=session).status_code == 401
    assert "node 'site-r' is revoked: ask the operator" in node.open()[0].json()["detail"]


def test_a_node_of_another_version_is_told_which_one_to_upgrade(node):
    answer, _ = node.open(speaks=0)
    assert answer.status_code == 409
    assert "node 'site-a' has coterie 1 (protocol 0), the server has" in answer.json()["detail"]
    assert "upgrade the older of the two" in answer.json()["detail"]


def test_a_key_that_was_never_enrolled_is_told_so(client, node):
    node.key = ec.generate_private_key(ec.SECP384R1())
    assert "this key is not enrolled" in node.open()[0].json()["detail"]


def test_an_update_is_taken_from_the_node_that_was_asked_at_its_size_and_while_it_is_awaited(client, federation, node):
    session, answered = node.session(), []
    federation.exchange.expect("m1", "site-a", 8, answered.append)
    federation.exchange.expect("m2", "site-b", 8, answered.append)
    put = lambda message, data: client.put(f"/api/v1/updates/{message}", content=data, headers=session)  # noqa: E731
    assert "the update has 7 bytes, the model asks for 8" in put("m1", b"1234567").json()["detail"]
    assert put("m1", b"x" * 1000).status_code == 400
    assert put("m2", b"12345678").status_code == 410
    awaited = [client.get(f"/api/v1/answers/{message}", headers=session).status_code for message in ("m1", "m2", "m3")]
    assert awaited == [200, 410, 410]
    assert put("m3", b"12345678").status_code == 410
    assert client.put("/api/v1/updates/m1?start=4", content=b"5678", headers=session).status_code == 409
    assert put("../../etc", b"12345678").status_code in (404, 405, 410)
    digest = put("m1", b"12345678").json()["sha256"]
    federation.exchange.answered("m1")
    federation.exchange.answered("m3")
    assert answered == ["m1"]
    assert federation.exchange.update("m1", digest).read_bytes() == b"12345678"
    federation.exchange.drop("m1")
    assert put("m1", b"12345678").status_code == 410


def test_a_model_is_served_in_pieces_while_it_is_offered(client, federation, node):
    session, digest = node.session(), federation.exchange.publish(lambda part: part.write_bytes(b"0123456789"))
    part = client.get(f"/api/v1/models/{digest}", headers=session | {"range": "bytes=4-"})
    assert (part.status_code, part.content) == (206, b"456789")
    assert client.get(f"/api/v1/models/{digest}").status_code == 401
    federation.exchange.withdraw(digest)
    assert client.get(f"/api/v1/models/{digest}", headers=session).status_code == 410


PATHS = ["nodes/enrol", "nodes/session", "nodes/leave", "answers/x", "runs", "tokens", "nodes/x/revoke"]
FIELDS = ["secret", "public_key", "timestamp", "instance", "offers", "version", "config", "name"]


@given(
    st.sampled_from(PATHS),
    st.one_of(st.binary(max_size=200), st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=20),
        lambda inner: st.dictionaries(
            st.sampled_from(FIELDS), inner
        ) | st.lists(inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_the_server_answers_in_order(client, path, body, operator):
    answer = client.post(f"/api/v1/{path}", content=body, headers=OPERATOR if operator else {})
    assert answer.status_code < 500
    assert client.get("/api/v1/health").json()["status"] == "ok"


def test_the_operators_token_is_made_once_and_for_its_owner_only(tmp_path):
    token = operator_token(tmp_path)
    assert operator_token(tmp_path) == token
    assert (tmp_path / "operator.token").stat().st_mode & 0o077 == 0
