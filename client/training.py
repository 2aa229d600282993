"""What one client does with its records: train from the global model, or evaluate it."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.client.algorithms import (
    LOCAL_ALGORITHMS,
    OPTIMIZERS,
    SCHEDULES,
    LocalAlgorithm,
    Optimizer,
    Schedule,
    clip_,
)
from coterie.client.flat_model import FlatModel
from coterie.core.choice import build
from coterie.core.errors import ConfigError
from coterie.core.run_config import LocalConfig
from coterie.core.seeding import derive_seed, torch_generator
from coterie.tasks.task import Loss, Metric, measure

BLOCK_VALUES = 1 << 20
"""Input values gathered at once: whole batches are cut from a block, which is cheaper than gathering each."""

EVALUATION_BATCH = 256
"""Records per forward pass in an evaluation. Fixed, so that the outputs do not depend on who computes them."""


@dataclass(frozen=True)
class LocalPlan:
    """A LocalConfig with its choices built."""

    config: LocalConfig
    algorithm: LocalAlgorithm
    optimizer: Optimizer
    schedule: Schedule
    rounds: int

    @classmethod
    def from_config(cls, config: LocalConfig, rounds: int) -> "LocalPlan":
        """Build the choices of a resolved LocalConfig. Raises ConfigError."""
        algorithm = config.algorithm
        if algorithm is None:
            raise ValueError("the run is not resolved: local.algorithm is not set")
        plan = cls(
            config,
            build(LOCAL_ALGORITHMS, algorithm, "local.algorithm", expects=LocalAlgorithm),
            build(OPTIMIZERS, config.optimizer, "local.optimizer", expects=Optimizer),
            build(SCHEDULES, config.lr_schedule, "local.lr_schedule", expects=Schedule),
            rounds,
        )
        for round in (1, rounds):
            try:
                factor = plan.schedule.factor(round, rounds)
            except (ValueError, ArithmeticError) as error:
                raise ConfigError(f"local.lr_schedule = {config.lr_schedule.name!r}: {error}") from error
            if not (factor >= 0 and math.isfinite(factor * config.lr)):
                raise ConfigError(
                    f"local.lr_schedule = {config.lr_schedule.name!r}: its factor in round {round} is {factor}: "
                    f"it must be finite and at least 0"
                )
        return plan


class LocalTrainer:
    """Trains and evaluates clients, one after the other, with one module on one device.

    Every job seeds torch's own generator, so what layers draw does not depend on the jobs before it.
    """

    def __init__(self, module: nn.Module, loss: Loss, plan: LocalPlan, device: torch.device, seed: int) -> None:
        self.model = FlatModel(module, device)
        self.loss = loss
        self.plan = plan
        self.seed = seed
        self._channels_last: bool | None = None

    def train(self, start: Tensor, inputs: Tensor, targets: Tensor, round: int, client_id: str) -> dict[str, float]:
        """One round of one client, from the global values `start[D]`, which must be on the model's device.

        Leaves the trained values in `self.model`. inputs[N, ...], targets[N, ...]: the client's records. Returns the
        mean loss over the steps as {"loss": ...}. Every random choice (order of the records, dropout layers) derives
        from (seed, round, client).
        """
        model, plan = self.model, self.plan
        config, lr = plan.config, plan.config.lr * plan.schedule.factor(round, plan.rounds)
        if len(inputs) < 1 + model.has_batch_norm:
            raise ValueError(f"the client has {len(inputs)} records: training needs {1 + model.has_batch_norm}")
        self._begin(start, inputs, "layers", round, client_id)
        params, grads = model.params, model.grads
        global_params = start[: len(params)]
        generator = torch_generator(self.seed, "batches", round, client_id)
        state = plan.optimizer.init(params)
        total, seen = torch.zeros((), device=model.device), 0
        model.module.train()
        for batch_inputs, batch_targets in self._batches(inputs, targets, generator):
            grads.zero_()
            with self._autocast():
                loss = self.loss(model.module(batch_inputs), batch_targets)
            loss.backward()
            with torch.no_grad():
                clip_(grads, config.clip_norm)
                plan.optimizer.step(params, grads, state, lr)
                plan.algorithm.after_step(params, global_params, lr)
                total.add_(loss.detach(), alpha=len(batch_targets))
            seen += len(batch_targets)
        model.collect()
        return {"loss": float(total) / seen}

    @torch.no_grad()
    def outputs(self, values: Tensor, inputs: Tensor, *purpose: str | int) -> Tensor:
        """Outputs[N, ...] of the model with `values[D]` on inputs[N, ...], float32 on the CPU.

        purpose: what layers that draw even in evaluation are seeded with, beside the run's seed.
        """
        self._begin(values, inputs, "outputs", *purpose)
        self.model.module.eval()
        parts: list[Tensor] = []
        for block in inputs.split(EVALUATION_BATCH):
            with self._autocast():
                parts.append(self.model.module(self._placed(block)).float().cpu())
        return torch.cat(parts)

    def evaluate(
        self, values: Tensor, inputs: Tensor, targets: Tensor, metrics: Mapping[str, Metric], round: int, client_id: str
    ) -> dict[str, float]:
        """Loss and metrics of the model with `values[D]` on a client's records."""
        return measure(self.outputs(values, inputs, round, client_id), targets, self.loss, metrics)

    def _begin(self, values: Tensor, inputs: Tensor, *purpose: str | int) -> None:
        """Take `values[D]`, forget earlier jobs, seed."""
        if self._channels_last is None and inputs.dim() == 4 and self.model.convolves:
            self._channels_last = self._takes_channels_last(inputs[:2])
        self.model.start_from(values)
        torch.manual_seed(derive_seed(self.seed, *purpose))

    def _batches(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches for one round."""
        config = self.plan.config
        sizes = self._batch_sizes(len(inputs))
        left = config.steps if config.steps is not None else (config.epochs or 0) * len(sizes)
        per_block = max(1, BLOCK_VALUES // max(1, config.batch_size * inputs[0].numel()))
        while left > 0:
            order = torch.randperm(len(inputs), generator=generator)
            for first in range(0, len(sizes), per_block):
                block_sizes = sizes[first : first + per_block]
                start = first * config.batch_size
                rows = order[start : start + sum(block_sizes)]
                block, answers = self._placed(inputs[rows]), targets[rows].to(self.model.device)
                for pair in zip(block.split(block_sizes), answers.split(block_sizes), strict=True):
                    if left == 0:
                        return
                    yield pair
                    left -= 1

    def _batch_sizes(self, num_examples: int) -> list[int]:
        """Sizes of one epoch's batches. A last batch of one joins the one before it where BatchNorm needs two
        records."""
        size = self.plan.config.batch_size
        full, rest = divmod(num_examples, size)
        if rest == 1 and full and self.model.has_batch_norm:
            return [size] * (full - 1) + [size + 1]
        return [size] * full + ([rest] if rest else [])

    def _placed(self, inputs: Tensor) -> Tensor:
        """Inputs on the device, images with channels last where the model can take that: convolutions are then
        faster."""
        inputs = inputs.to(self.model.device)
        # contiguous() would leave images of one channel as they are.
        return inputs.to(memory_format=torch.channels_last) if self._channels_last else inputs

    def _takes_channels_last(self, inputs: Tensor) -> bool:
        """Try two records: a module that calls view() on a convolution's output cannot take channels-last input."""
        inputs = inputs.to(self.model.device, memory_format=torch.channels_last)
        try:
            with torch.no_grad():
                self.model.module.eval()(inputs)
        except RuntimeError:
            return False
        return True

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.plan.config.precision == "bfloat16":
            return torch.autocast(self.model.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
