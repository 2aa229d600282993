"""Enrolment: a token is good once, for one name, for a while; secrets and private keys stay where they are."""

import sqlite3
import threading

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.core.errors import ConfigError
from coterie.server.enrolment import Enrolment, EnrolmentError, NameInUseError, NodeStatus
from coterie.server.store import Store


def public_key(curve=None):
    key = ec.generate_private_key(curve or ec.SECP384R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def enrolment(tmp_path, clock):
    return Enrolment(Store(tmp_path / "coterie.db"), "f" * 64, clock=clock)


def secret(token):
    return token.partition(".")[0]


def refusal(enrolment, secret, key=None):
    with pytest.raises(EnrolmentError) as raised:
        enrolment.redeem(secret, key or public_key())
    assert secret not in str(raised.value) or not secret
    return raised.value.code


def test_a_token_makes_a_node_once(enrolment):
    token, key = enrolment.new("site-a", ["eu"]), public_key()
    assert token.endswith("." + "f" * 64)
    assert not token.startswith("-")
    node = enrolment.redeem(secret(token), key)
    assert (node.name, node.status, node.tags) == ("site-a", NodeStatus.ACTIVE, ("eu",))
    assert enrolment.node_of(key) == node == enrolment.nodes()[0]
    assert refusal(enrolment, secret(token)) == "token_used"
    assert refusal(enrolment, secret(token), key) == "token_used"


def test_only_the_hash_of_a_secret_is_stored(enrolment, tmp_path):
    token = enrolment.new("site-a")
    dump = "\n".join(sqlite3.connect(tmp_path / "coterie.db").iterdump())
    assert secret(token) not in dump


def test_what_is_wrong_with_a_token_or_a_key_is_told_apart(enrolment, clock):
    assert refusal(enrolment, "0" * 48) == "unknown_token"
    old = enrolment.new("site-a")
    enrolment.new("site-a")
    assert refusal(enrolment, secret(old)) == "token_revoked"
    late = enrolment.new("site-b", valid_seconds=60)
    clock.now += 61
    assert refusal(enrolment, secret(late)) == "token_expired"
    good, key = enrolment.new("site-c"), public_key()
    assert refusal(enrolment, secret(good), public_key(ec.SECP256R1())) == "bad_key"
    assert refusal(enrolment, secret(good), b"no key at all") == "bad_key"
    enrolment.redeem(secret(good), key)
    assert refusal(enrolment, secret(enrolment.new("site-d")), key) == "key_in_use"


def test_a_key_is_rotated_and_a_node_revoked(enrolment):
    first, second = public_key(), public_key()
    enrolment.redeem(secret(enrolment.new("site-a")), first)
    with pytest.raises(NameInUseError, match="node 'site-a' is active: rotate its key, revoke it first"):
        enrolment.new("site-a")
    enrolment.redeem(secret(enrolment.new("site-a", rotate=True)), second)
    assert enrolment.node_of(first) is None
    assert enrolment.node_of(second).name == "site-a"
    enrolment.revoke("site-a")
    assert enrolment.node_of(second).status is NodeStatus.REVOKED
    assert [node.status for node in enrolment.nodes()] == [NodeStatus.REVOKED]


def test_of_two_sites_with_one_token_exactly_one_gets_in(enrolment):
    for i in range(5):
        token, results = secret(enrolment.new(f"site-{i}")), []

        def redeem(token=token, results=results):
            try:
                results.append(enrolment.redeem(token, public_key()).name)
            except EnrolmentError as error:
                results.append(error.code)

        threads = [threading.Thread(target=redeem) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == sorted([f"site-{i}", "token_used", "token_used", "token_used"])


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "ä", "a" * 65, "a\n"])
def test_names_that_are_none_are_refused(enrolment, name):
    with pytest.raises(ConfigError, match="cannot name a node"):
        enrolment.new(name)
