"""Flower's own FedAvg over empty clients; the end of each round is written down as it comes."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that appends a line to a file when it has aggregated."""

    progress: Path

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        with self.progress.open("a") as file:
            file.write(f"{server_round} {time.time()} {sum(not reply.has_error() for reply in replies)}\n")
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes, values = int(config["nodes"]), int(config["values"])
    strategy = Timed(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_evaluate_nodes=0,
        min_available_nodes=nodes,
    )  # fmt: skip
    strategy.progress = Path(str(config["progress"]))
    arrays = ArrayRecord({"values": torch.zeros(values)})
    strategy.start(grid, arrays, num_rounds=int(config["rounds"]))
