"""Enrolment: one token, one node, one key; whatever else is tried is refused by name, and no secret is kept."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from coterie.core.errors import ConfigError, RunError, StorageError
from coterie.server.enrolment import (
    BadKeyError,
    Enrolment,
    EnrolmentError,
    KeyInUseError,
    NameInUseError,
    NodeStatus,
    TokenExpiredError,
    TokenRevokedError,
    TokenUsedError,
    UnknownNodeError,
    UnknownTokenError,
    check_name,
)
from coterie.server.store import Store

FINGERPRINT = "ab" * 32


class Clock:
    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self):
        return self.now


def public_pem(key, form=PublicFormat.SubjectPublicKeyInfo):
    return key.public_key().public_bytes(Encoding.PEM, form)


def new_key():
    return public_pem(ec.generate_private_key(ec.SECP384R1()))


def secret_of(token):
    return token.split(".")[0]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(where):
    store = Store(where)
    yield store
    store.close()


@pytest.fixture
def enrolment(store, clock):
    return Enrolment(store, FINGERPRINT, clock=clock)


def enrol(enrolment, name="north", key=None, **more):
    return enrolment.redeem(secret_of(enrolment.new(name, **more)), key or new_key())


def test_a_token_makes_a_node(enrolment, clock):
    key = new_key()
    node = enrol(enrolment, "north", key, tags=["hospital", "gpu"])
    assert (node.name, node.status, node.tags) == ("north", NodeStatus.ACTIVE, ("hospital", "gpu"))
    assert (node.public_key, node.created, node.last_seen) == (key.decode(), clock.now, None)
    assert enrolment.nodes() == [node]
    assert enrolment.node_of(key) == node


def test_a_token_carries_the_fingerprint_to_pin(store, enrolment):
    # Hexadecimal: a token that began with a hyphen would read as an option.
    assert re.fullmatch(rf"[0-9a-f]{{48}}\.{FINGERPRINT}", enrolment.new("north"))
    assert re.fullmatch(r"[0-9a-f]{48}\.-", Enrolment(store, "-").new("south"))


def test_the_secret_is_kept_nowhere(store, enrolment, tmp_path):
    secret = secret_of(enrolment.new("north"))
    enrolment.redeem(secret, new_key())
    with pytest.raises(TokenUsedError) as refused:
        enrolment.redeem(secret, new_key())
    with pytest.raises(UnknownTokenError) as unknown:
        enrolment.redeem(f"x{secret}", new_key())
    assert secret not in f"{refused.value!r} {unknown.value!r} {enrolment!r} {enrolment.nodes()}"
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()


def test_a_node_that_comes_back_is_found_under_another_spelling_of_its_key(enrolment):
    key = new_key()
    node = enrol(enrolment, key=key)
    respelled = b"from the site\n" + key.replace(b"\n", b"\r\n")
    assert enrolment.node_of(respelled) == node
    secret = secret_of(enrolment.new("south"))
    with pytest.raises(KeyInUseError):
        enrolment.redeem(secret, respelled)


def test_a_token_works_once(enrolment):
    secret, key = secret_of(enrolment.new("north")), new_key()
    enrolment.redeem(secret, key)
    for replay in (key, new_key()):
        with pytest.raises(TokenUsedError, match=r"'north' was used at 2023-11-14 22:13:20 UTC: ask the operator"):
            enrolment.redeem(secret, replay)
    assert [node.public_key for node in enrolment.nodes()] == [key.decode()]


@pytest.mark.parametrize("secret", ["", "nonsense", "x" * 100_000, "\ud800", "ключ", "' OR 1=1 --"])
def test_an_unknown_token_is_refused(enrolment, secret):
    enrolment.new("north")
    with pytest.raises(UnknownTokenError, match="there is no such enrolment token: check that it was copied whole"):
        enrolment.redeem(secret, new_key())


def test_a_whole_token_is_no_secret(enrolment):
    with pytest.raises(UnknownTokenError):
        enrolment.redeem(enrolment.new("north"), new_key())


def test_a_token_expires(enrolment, clock):
    secret, other = secret_of(enrolment.new("north", valid_seconds=60)), secret_of(enrolment.new("south"))
    clock.now += 59.9
    assert enrolment.redeem(other, new_key()).name == "south"
    clock.now += 0.1
    with pytest.raises(TokenExpiredError, match=r"'north' expired at 2023-11-14 22:14:20 UTC: ask the operator"):
        enrolment.redeem(secret, new_key())


def test_a_new_token_revokes_the_earlier_one_of_its_name_only(enrolment):
    first, other, second = (secret_of(enrolment.new(name)) for name in ("north", "south", "north"))
    with pytest.raises(TokenRevokedError, match="'north' was revoked at"):
        enrolment.redeem(first, new_key())
    assert enrolment.redeem(second, new_key()).name == "north"
    assert enrolment.redeem(other, new_key()).name == "south"


def test_a_used_token_is_called_used_after_a_newer_one(enrolment):
    secret = secret_of(enrolment.new("north"))
    enrolment.redeem(secret, new_key())
    enrolment.new("north", rotate=True)
    with pytest.raises(TokenUsedError):
        enrolment.redeem(secret, new_key())


def test_an_active_node_keeps_its_name_unless_its_key_is_rotated(enrolment):
    enrol(enrolment)
    with pytest.raises(NameInUseError, match="node 'north' is active: rotate its key, revoke it"):
        enrolment.new("north")
    enrolment.new("north", rotate=True)


def test_a_rotation_replaces_the_key_and_keeps_the_rest(enrolment, clock):
    old, new = new_key(), new_key()
    first = enrol(enrolment, key=old, tags=["gpu"])
    enrolment.seen("north", clock.now + 5)
    clock.now += 100
    secret = secret_of(enrolment.new("north", rotate=True))
    assert enrolment.node_of(old) is not None  # works on until the site has its new key
    with pytest.raises(KeyInUseError):
        enrolment.redeem(secret, old)
    node = enrolment.redeem(secret, new)
    assert (node.tags, node.created, node.last_seen) == (("gpu",), first.created, first.created + 5)
    assert enrolment.node_of(old) is None
    assert enrolment.nodes() == [enrolment.node_of(new)] == [node]


def test_a_rotation_may_change_the_tags(enrolment):
    enrol(enrolment, tags=["gpu"])
    assert enrol(enrolment, tags=["cpu"], rotate=True).tags == ("cpu",)


def test_a_revoked_node_is_out_with_its_key_and_its_tokens(enrolment):
    key = new_key()
    enrol(enrolment, key=key)
    rotation = secret_of(enrolment.new("north", rotate=True))
    enrolment.revoke("north")
    enrolment.revoke("north")
    assert [node.status for node in enrolment.nodes()] == [NodeStatus.REVOKED]
    assert enrolment.node_of(key).status is NodeStatus.REVOKED
    with pytest.raises(TokenRevokedError):
        enrolment.redeem(rotation, new_key())
    secret = secret_of(enrolment.new("south"))
    with pytest.raises(KeyInUseError):
        enrolment.redeem(secret, key)


def test_a_revoked_name_enrols_again_as_a_new_node(enrolment, clock):
    enrol(enrolment, tags=["gpu"])
    enrolment.seen("north", clock.now)
    enrolment.revoke("north")
    clock.now += 100
    node = enrol(enrolment)
    assert (node.status, node.tags, node.created, node.last_seen) == (NodeStatus.ACTIVE, (), clock.now, None)
    assert enrolment.nodes() == [node]


def test_a_token_is_revoked_before_there_is_a_node(enrolment):
    secret = secret_of(enrolment.new("north"))
    enrolment.revoke("north")
    with pytest.raises(TokenRevokedError):
        enrolment.redeem(secret, new_key())
    with pytest.raises(UnknownNodeError, match="there is no node 'nroth': list the nodes"):
        enrolment.revoke("nroth")


P256, P384 = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP384R1())


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"nonsense",
        new_key()[:100],
        new_key() + b" " * 5000,
        public_pem(P256),
        public_pem(ed25519.Ed25519PrivateKey.generate()),
        P384.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        P384.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        P384.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
    ],
    ids=["empty", "nonsense", "cut", "huge", "p256", "ed25519", "private", "der", "ssh"],
)
def test_a_wrong_key_is_refused_and_leaves_the_token_usable(enrolment, key):
    secret = secret_of(enrolment.new("north"))
    with pytest.raises(BadKeyError, match="the public key for node 'north' is no EC P-384 key in PEM"):
        enrolment.redeem(secret, key)
    assert enrolment.node_of(key) is None
    assert enrolment.nodes() == []
    assert enrolment.redeem(secret, new_key()).name == "north"


def test_a_key_in_use_leaves_the_token_usable(enrolment):
    key = new_key()
    enrol(enrolment, key=key)
    secret = secret_of(enrolment.new("south"))
    with pytest.raises(KeyInUseError, match="the public key for node 'south' is in use already: make a new key pair"):
        enrolment.redeem(secret, key)
    assert enrolment.redeem(secret, new_key()).name == "south"


def test_every_refusal_has_a_code_of_its_own():
    codes = [error.code for error in EnrolmentError.__subclasses__()]
    expected = {"unknown_token", "token_used", "token_expired", "token_revoked", "bad_key", "key_in_use"}
    assert expected < set(codes)
    assert len(codes) == len(set(codes))
    assert issubclass(EnrolmentError, RunError)


def attempts(enrolment, secrets, keys):
    """What each of several threads, let go at once, gets for its secret and key."""
    barrier = Barrier(len(keys))

    def attempt(secret, key):
        barrier.wait()
        try:
            return enrolment.redeem(secret, key)
        except EnrolmentError as error:
            return error.code

    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(attempt, secrets, keys))


def test_of_threads_with_one_token_exactly_one_wins(enrolment):
    for turn in range(5):
        secret, keys = secret_of(enrolment.new(f"n{turn}")), [new_key() for _ in range(4)]
        results = attempts(enrolment, [secret] * 4, keys)
        (won,) = (result for result in results if result != "token_used")
        assert enrolment.node_of(keys[results.index(won)]) == won
    assert len(enrolment.nodes()) == 5


def test_of_threads_with_one_key_exactly_one_wins(enrolment):
    secrets = [secret_of(enrolment.new(f"n{i}")) for i in range(4)]
    results = attempts(enrolment, secrets, [new_key()] * 4)
    assert sorted(results, key=str).count("key_in_use") == 3
    assert len(enrolment.nodes()) == 1


def test_of_processes_with_one_token_exactly_one_wins(enrolment, where, tmp_path):
    script = """
import sys
from pathlib import Path
from coterie.server.enrolment import Enrolment, EnrolmentError
from coterie.server.store import Store
where = sys.argv[1]
store = Store(where if where.startswith("postgresql:") else Path(where))
enrolment = Enrolment(store, "-", clock=lambda: 1_700_000_000.0)
print("ready", flush=True)
sys.stdin.readline()
try:
    print(enrolment.redeem(sys.argv[2], Path(sys.argv[3]).read_bytes()).name)
except EnrolmentError as error:
    print(error.code)
"""
    secret, started = secret_of(enrolment.new("north")), []
    for i in range(3):
        (tmp_path / f"{i}.pem").write_bytes(new_key())
        command = [sys.executable, "-c", script, str(where), secret, str(tmp_path / f"{i}.pem")]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=60)[0].strip() for process in started]
    assert sorted(results) == ["north", "token_used", "token_used"]


def test_the_latest_time_seen_counts(enrolment):
    enrol(enrolment)
    for time in (50.0, 70.5, 60.0):
        enrolment.seen("north", time)
    assert enrolment.nodes()[0].last_seen == 70.5
    with pytest.raises(UnknownNodeError, match="'south'"):
        enrolment.seen("south", 1.0)


def test_nodes_come_by_name(enrolment):
    for name in ("c", "a", "b"):
        enrol(enrolment, name)
    assert [node.name for node in enrolment.nodes()] == ["a", "b", "c"]


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True))
def test_names_of_plain_characters_will_do(name):
    check_name(name)


@given(st.text())
def test_any_other_name_is_refused(name):
    allowed = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    if 1 <= len(name) <= 64 and set(name) <= allowed and name[0] not in "._-":
        check_name(name)
    else:
        with pytest.raises(ConfigError) as refused:
            check_name(name)
        assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", ["", "-n", ".n", "_n", "n\n", "n n", "n/../m", "é", "n" * 65, "٣"])
def test_a_wrong_name_makes_no_token(enrolment, name):
    with pytest.raises(ConfigError, match="cannot name a node: use 1 to 64 letters"):
        enrolment.new(name)


@pytest.mark.parametrize("tags", ["gpu", [""], [" gpu"], ["a\nb"], ["x" * 65]])
def test_a_wrong_tag_makes_no_token(enrolment, tags):
    with pytest.raises(ConfigError, match="tag"):
        enrolment.new("north", tags)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_token_must_be_valid_for_a_while(enrolment, seconds):
    with pytest.raises(ConfigError, match="a token cannot be valid for"):
        enrolment.new("north", valid_seconds=seconds)


def test_an_admission_survives_a_power_cut(enrolment, store):
    with enrolment._write() as connection:
        if connection.dialect.name == "sqlite":
            assert connection.scalar(sa.text("PRAGMA synchronous")) == 2  # FULL
        else:
            assert connection.scalar(sa.text("SHOW synchronous_commit")) == "on"


def test_a_broken_store_is_named(enrolment, store):
    with store.connect() as connection:
        connection.execute(sa.text("DROP TABLE nodes"))
    with pytest.raises(
        StorageError, match=r"cannot write to the run store .*(no such table: nodes|\"nodes\" does not)"
    ):
        enrolment.nodes()
    with pytest.raises(StorageError, match="cannot write to the run store"):
        enrolment.new("north")


SABOTAGE = {
    "sqlite": (
        "CREATE TRIGGER t BEFORE UPDATE ON enrolment_tokens BEGIN SELECT RAISE(ABORT, 'no'); END",
        "DROP TRIGGER t",
    ),
    "postgresql": (
        "CREATE FUNCTION no() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'no'; END $$ LANGUAGE plpgsql; "
        "CREATE TRIGGER t BEFORE UPDATE ON enrolment_tokens EXECUTE FUNCTION no()",
        "DROP TRIGGER t ON enrolment_tokens",
    ),
}


def test_what_fails_half_way_changes_nothing(enrolment, store):
    secret = secret_of(enrolment.new("north"))
    sabotage, mend = SABOTAGE[store.database.engine.dialect.name]
    with store.connect() as connection:
        connection.execute(sa.text(sabotage))
    with pytest.raises(StorageError):
        enrolment.redeem(secret, new_key())
    assert enrolment.nodes() == []
    with store.connect() as connection:
        connection.execute(sa.text(mend))
    assert enrolment.redeem(secret, new_key()).name == "north"
