"""Coterie's federation against a plain Flower one, side by side in one run on this machine, all on loopback.

Both start their own commands, three nodes each. Coterie's nodes train one step on one record in their worker process;
Flower's give back what they got. Coterie has node keys and SQLite always; "tls" adds TLS to it, and TLS, node keys and
SQLite to Flower. The light nodes speak each one's real protocol in one process, so that the server alone is under load.

    python benchmarks/federation.py            # full, about ten minutes on two cores and 16 GB
    python benchmarks/federation.py --quick --json
"""

import argparse
import json
import statistics
from typing import Any

from federation_coterie import coterie, workers_of
from federation_stock import stock
from processes import Rounds, resident_mb

NODES = 3
MB_100 = 25_000_000
GB_3 = 750_000_000


class Report:
    """What is measured, as it comes."""

    def __init__(self) -> None:
        self.ratios: dict[str, Any] = {}
        self.seen: dict[str, float] = {}

    def ratio(self, name: str, value: float, target: float) -> None:
        """A figure with its target: smaller is better."""
        self.ratios[name] = {"value": round(value, 4), "target": f"<= {target:g}", "met": value <= target}
        print(f"{'  ok  ' if value <= target else 'MISSED'}  {name}: {value:.4f} (target {target:g})", flush=True)

    def tell(self, name: str, value: float) -> None:
        """A figure without a target."""
        self.seen[name] = round(value, 4)
        print(f"        {name}: {value:.4f}", flush=True)


def rounds_of(report: Report, rounds: int, quick: bool) -> None:
    """Seconds per round: empty, and with a model of 100 MB; with TLS and without. Memory of an idle node."""
    for secure in (False, True):
        suffix = "tls" if secure else "plain"
        ours: dict[int, float] = {}
        with coterie(secure) as here:
            pids = [here.node(f"site-{index}") for index in range(NODES)]
            here.wait(NODES)
            ours[10] = _seconds(here.run(NODES, 20 if quick else 50))
            if not secure:
                report.tell("coterie_idle_daemon_mb", statistics.median(map(resident_mb, pids)))
                report.tell("coterie_idle_worker_mb", statistics.median(map(resident_mb, workers_of(pids))))
                report.tell("coterie_server_mb", resident_mb(here.process.pid))
        with coterie(secure) as here:
            for index in range(NODES):
                here.node(f"site-{index}", MB_100)
            here.wait(NODES)
            ours[MB_100] = _seconds(here.run(NODES, 4, MB_100))
        theirs: dict[int, float] = {}
        if not (quick and secure):
            with stock(secure) as there:
                pids = [there.node(index) for index in range(NODES)]
                for values in (10, MB_100):
                    theirs[values] = _seconds(there.run(NODES, rounds, values))
                if not secure:
                    report.tell("flower_idle_supernode_mb", statistics.median(map(resident_mb, pids)))
        for values, name in ((10, "empty"), (MB_100, "100mb")):
            report.tell(f"coterie_{name}_round_{suffix}_s", ours[values])
            if values in theirs:
                report.tell(f"flower_{name}_round_{suffix}_s", theirs[values])
                report.ratio(f"{name}_round_{suffix}_vs_flower", ours[values] / theirs[values], 1 / 3)
        report.ratio(f"empty_round_{suffix}_s", ours[10], 0.8 if secure else 0.3)


def many_in_a_round(report: Report, count: int, rounds: int) -> None:
    """The server's processor time for one client of a round, with a hundred light nodes."""
    with coterie(secure=False) as here:
        here.light(count)
        found = here.run(count, 10)
        ours = found.server_cpu() / count
        report.tell(f"coterie_round_of_{count}_s", _seconds(found))
    with stock() as there:
        there.light(count)
        found = there.run(count, rounds + 1, 10, 400)
        theirs = found.server_cpu() / count
        report.tell(f"flower_round_of_{count}_s", _seconds(found))
    report.tell("coterie_server_cpu_per_client_ms", 1e3 * ours)
    report.tell("flower_server_cpu_per_client_ms", 1e3 * theirs)
    report.ratio("server_cpu_per_client_vs_flower", ours / theirs, 1 / 3)


def idle(report: Report, count: int, seconds: float) -> None:
    """What light nodes that have nothing to do cost the server, with TLS."""
    with coterie() as here:
        here.light(count)
        here.idle_cpu(10)  # the first connections settle
        report.ratio(f"server_cores_for_{count}_idle", here.idle_cpu(seconds), 0.2)
        here.wait(count)


def large(report: Report) -> None:
    """A model of 3 GB through a server with defaults, two light nodes."""
    with coterie() as here:
        here.light(2)
        report.tell("coterie_3gb_round_s", _seconds(here.run(2, 2, GB_3)))
        report.tell("coterie_3gb_server_mb", resident_mb(here.process.pid))


def _seconds(rounds: Rounds) -> float:
    return statistics.median(rounds.seconds())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 150 s on two cores")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--only", choices=["rounds", "many", "idle", "large"], help="one part of it")
    arguments = parser.parse_args()
    report, quick = Report(), arguments.quick
    parts = {
        "rounds": lambda: rounds_of(report, 2 if quick else 4, quick),
        "many": lambda: many_in_a_round(report, 100, 1 if quick else 3),
        "idle": lambda: idle(report, 500, 60.0),
        "large": lambda: large(report),
    }
    for name, part in parts.items():
        if arguments.only == name or (arguments.only is None and not (quick and name in ("idle", "large"))):
            part()
    if arguments.json:
        print(json.dumps({"ratios": report.ratios, "seen": report.seen}))


if __name__ == "__main__":
    main()
