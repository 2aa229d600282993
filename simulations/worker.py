"""What a worker process does: trains and evaluates clients, one after the other, on one core."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.client.devices import choose_device
from coterie.client.training import LocalPlan, LocalTrainer
from coterie.core.model_state import ModelState
from coterie.core.run_config import LocalConfig
from coterie.core.seeding import torch_generator
from coterie.simulations.attacks import Attack


@dataclass(frozen=True)
class ClientSlice:
    """Where a client's records lie in the shared tensors: those it trains on, and those it evaluates on (the same ones,
    or some that it keeps from training)."""

    id: str
    training: slice
    evaluation: slice

    @property
    def num_examples(self) -> int:
        return self.training.stop - self.training.start

    @property
    def num_evaluation_examples(self) -> int:
        return self.evaluation.stop - self.evaluation.start


@dataclass(frozen=True)
class Setup:
    """What a worker needs once. `tensors` gives shape and dtype of each shared tensor, in the order of the
    descriptors."""

    model: Callable[[], nn.Module]
    initial: ModelState
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Callable[[Tensor, Tensor], float]]
    num_classes: int | None
    local: LocalConfig
    rounds: int
    seed: int
    clients: tuple[ClientSlice, ...]
    attack: Attack
    attackers: frozenset[str]
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def start(self, shared: Mapping[str, Tensor]) -> "Worker":
        """The worker, in its own process."""
        return Worker(self, shared)


class Worker:
    """Does jobs: each is a method's name and its arguments; the answer is what the method returns."""

    def __init__(self, setup: Setup, shared: Mapping[str, Tensor]) -> None:
        self.setup = setup
        self.shared = shared
        device = choose_device(setup.local.device)
        plan = LocalPlan.from_config(setup.local, setup.rounds)
        self.trainer = LocalTrainer(setup.model(), setup.loss, plan, device, setup.seed)
        self.trainer.model.load(setup.initial)

    def train(self, index: int, round: int, slot: int) -> dict[str, float]:
        """Train one client from the shared global model and leave its update in a slot."""
        setup, client = self.setup, self.setup.clients[index]
        rows = client.training
        inputs, targets = self.shared["inputs"][rows], self.shared["targets"][rows]
        attacks = client.id in setup.attackers
        if attacks:
            targets = setup.attack.poison_targets(targets, setup.num_classes)
        start = self._global()
        metrics = self.trainer.train(start, inputs, targets, round, client.id)
        delta = self.shared["updates"][slot]
        if start.device.type == "cpu":
            torch.sub(self.trainer.model.values, start, out=delta)
        else:
            delta.copy_(self.trainer.model.values - start)
        if attacks:
            setup.attack.poison_update(delta, torch_generator(setup.seed, "attack", round, client.id))
        return metrics

    def evaluate(self, index: int, round: int) -> dict[str, float]:
        """Evaluate the shared global model on one client's records."""
        client = self.setup.clients[index]
        inputs, targets = self.shared["inputs"][client.evaluation], self.shared["targets"][client.evaluation]
        return self.trainer.evaluate(self._global(), inputs, targets, self.setup.metrics, round, client.id)

    def outputs(self, start: int, end: int) -> None:
        """Outputs of the shared global model on held-out records [start, end), into the shared outputs."""
        inputs = self.shared["test_inputs"][start:end]
        self.shared["outputs"][start:end] = self.trainer.outputs(self._global(), inputs, start)

    def _global(self) -> Tensor:
        return self.shared["global"].to(self.trainer.model.device)
