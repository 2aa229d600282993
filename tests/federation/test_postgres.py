"""A server whose store is a PostgreSQL: killed, and cut off from it, it ends with the same bits."""

from coterie.server.store import Store

from ..commands import wait_for
from .test_federation import SETTINGS, SITES, TASK


def test_killed_and_cut_off_from_its_database_a_server_ends_with_the_same_bits(fed, simulated, postgres):
    url = postgres.new()
    fed.cli.env["COTERIE_DATABASE"] = url
    fed.start("--insecure")
    for name in SITES:
        fed.site(name, TASK.format(name))
    watching = fed.submit(rounds=30, **SETTINGS)
    wait_for(lambda: fed.rounds_done() >= 5, "5 rounds", 120)
    fed.stop()
    fed.start("--insecure")
    wait_for(lambda: fed.rounds_done() >= 10, "10 rounds", 120)
    postgres.stop()
    assert "the run store postgresql" in fed.cli("status", code=1).stderr
    postgres.start()
    result = fed.result(watching)
    assert result["model"]["sha256"] == simulated(30, 2)
    store = Store(url)
    assert (store.find("last").status, store.find("last").rounds_done) == ("finished", 30)
    store.close()
    assert not (fed.cli.home / "coterie.db").exists()
    assert postgres.password not in fed.log.read_text()
    assert "finished" in fed.cli("runs", "list").stdout
