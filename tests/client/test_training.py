"""Local training: what torch would do, only flat; the corrections do what their papers say; random choices repeat."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.client.algorithms import SGD, Adam, Cosine, Exponential, FedProx, Step, clip_
from coterie.client.training import LocalPlan, LocalTrainer
from coterie.core.errors import ConfigError, ModelError, TaskError
from coterie.core.model_state import ModelState
from coterie.core.run_config import RunConfig
from coterie.tasks.task import measure

CPU = torch.device("cpu")


def plan(rounds=10, **local):
    return LocalPlan.from_config(RunConfig.from_dict({"local": local}).resolve(20).local, rounds)


def data(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def trainer(module=None, seed=7, **local):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)) if module is None else module
    return LocalTrainer(module, F.cross_entropy, plan(**local), CPU, seed)


def trained(one, inputs, targets, round=1, client_id="a"):
    start = one.model.values.clone()
    metrics = one.train(start, inputs, targets, round, client_id)
    return start, one.model.values.clone(), metrics


def test_one_full_batch_step_is_plain_sgd():
    inputs, targets = data()
    one = trainer(batch_size=40, epochs=1, lr=0.3)
    _, end, _ = trained(one, inputs, targets)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    F.cross_entropy(reference(inputs), targets).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= 0.3 * parameter.grad
    assert torch.allclose(end, ModelState.from_module(reference).flat, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (SGD(0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
        (SGD(0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
        (Adam(), lambda p: torch.optim.Adam(p, 0.1)),
        (Adam(0.8, 0.9, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.9), weight_decay=0.1)),
    ],
)
def test_optimizers_agree_with_torch(ours, theirs):
    params, reference = torch.randn(20), nn.Parameter(torch.zeros(20))
    reference.data.copy_(params)
    optimizer, state = theirs([reference]), ours.init(params)
    for seed in range(5):
        grads = torch.randn(20, generator=torch.Generator().manual_seed(seed))
        reference.grad = grads.clone()
        optimizer.step()
        ours.step(params, grads.clone(), state, 0.1)
    assert torch.allclose(params, reference.detach(), atol=1e-6)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, nesterov=True, weight_decay=0.01), Adam()])
def test_the_same_code_trains_many_clients_at_once(optimizer):
    params, grads = torch.randn(3, 20), torch.randn(3, 20)
    alone = [row.clone() for row in params]
    for row, grad in zip(alone, grads, strict=True):
        own = grad.clone()
        clip_(own, 1.0)
        optimizer.step(row, own, optimizer.init(row), 0.1)
        FedProx(0.5).after_step(row, torch.zeros(20), 0.1)
    clip_(grads, 1.0)
    optimizer.step(params, grads, optimizer.init(params), 0.1)
    FedProx(0.5).after_step(params, torch.zeros(20), 0.1)
    assert torch.allclose(params, torch.stack(alone), atol=1e-6)


def test_fedprox_with_a_huge_mu_leaves_the_global_model_where_it_was():
    inputs, targets = data()
    start, end, _ = trained(trainer(algorithm={"name": "fedprox", "mu": 1e6}, epochs=5, lr=0.1), inputs, targets)
    assert torch.allclose(end, start, atol=1e-5)


def test_fedprox_with_a_small_mu_is_the_usual_gradient_term():
    mu, lr = 0.01, 0.05
    params, start, grads = torch.randn(20), torch.randn(20), torch.randn(20)
    expected = params - lr * (grads + mu * (params - start))
    ours = params.clone()
    SGD().step(ours, grads.clone(), {}, lr)
    FedProx(mu).after_step(ours, start, lr)
    assert torch.allclose(ours, expected, atol=2 * lr * mu * lr * float(grads.abs().max()))


@pytest.mark.parametrize("mu", [0.0, -1.0, math.inf, math.nan])
def test_fedprox_needs_a_positive_mu(mu):
    with pytest.raises(ValueError, match="FedProx needs a finite mu > 0"):
        FedProx(mu)


def test_clipping_bounds_the_norm_and_leaves_short_gradients_alone():
    grads = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    clip_(grads, 1.0)
    assert torch.allclose(grads, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_the_same_client_in_the_same_round_trains_the_same_bits():
    inputs, targets = data()
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    one = trainer(module)
    start = one.model.values.clone()
    ends = []
    for round, client_id in ((1, "a"), (2, "a"), (1, "b"), (1, "a")):
        one.train(start, inputs, targets, round, client_id)
        ends.append(one.model.values.clone())
    assert torch.equal(ends[0], ends[3])
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_steps_replace_epochs():
    calls = []
    one = trainer(steps=7, batch_size=10)
    one.model.module.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    trained(one, *data(25))
    assert calls == [10, 10, 5, 10, 10, 5, 10]


def test_every_record_is_seen_once_per_epoch():
    seen = []
    one = trainer(epochs=2, batch_size=10)
    one.model.module.register_forward_hook(lambda module, args, out: seen.append(args[0].clone()))
    inputs, targets = data(25)
    trained(one, inputs, targets)
    epochs = torch.cat(seen).split(25)
    assert len(epochs) == 2
    for epoch in epochs:
        assert torch.equal(epoch.sort(0).values, inputs.sort(0).values)
    assert not torch.equal(epochs[0], epochs[1])


def batch_norm_net():
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def test_batch_norm_statistics_are_part_of_the_update_and_counters_are_not():
    one = trainer(batch_norm_net(), epochs=1)
    start, end, _ = trained(one, *data())
    changed = {entry.name for (entry, a), (_, b) in zip(
        one.model.layout.views(start), one.model.layout.views(end), strict=True) if not torch.equal(a, b)}  # fmt: skip
    assert {"1.running_mean", "1.running_var"} <= changed
    assert one.model.fixed["1.num_batches_tracked"].shape == ()


def test_a_last_batch_of_one_does_not_stop_batch_norm():
    sizes = []
    one = trainer(batch_norm_net(), epochs=1, batch_size=10)
    one.model.module.register_forward_hook(lambda module, args, out: sizes.append(len(args[0])))
    trained(one, *data(21))
    assert sizes == [10, 11]


def test_one_record_is_too_few_for_batch_norm_and_says_so():
    with pytest.raises(ValueError, match="the client has 1 records: training needs 2"):
        trained(trainer(batch_norm_net()), *data(1))


class ReplacesItsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
        return self.layer(x)


def test_a_buffer_that_the_module_replaces_is_collected():
    one = trainer(ReplacesItsBuffer(), epochs=1, batch_size=10)
    for _ in range(2):
        start, end, _ = trained(one, *data(40))
        assert end[-1] - start[-1] == 4


class CallsView(nn.Module):
    """As the PyTorch tutorials write it: view() on a convolution's output cannot take channels-last memory."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 36, 3)

    def forward(self, x):
        x = F.relu(self.conv(x))
        return self.out(x.view(-1, 4 * 36))


class CallsFlatten(CallsView):
    def forward(self, x):
        return self.out(F.relu(self.conv(x)).flatten(1))


def test_a_model_that_cannot_take_channels_last_trains_the_same():
    inputs, targets = torch.randn(20, 1, 6, 6), torch.randint(0, 3, (20,))
    ends = []
    for kind in (CallsView, CallsFlatten):
        torch.manual_seed(0)
        one = trainer(kind(), epochs=1, batch_size=5)
        ends.append(trained(one, inputs, targets)[1])
    assert torch.allclose(ends[0], ends[1], atol=1e-5)


def test_bfloat16_learns_about_the_same():
    inputs, targets = data(200)
    losses = [trained(trainer(precision=p, epochs=3), inputs, targets)[2]["loss"] for p in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_outputs_do_not_depend_on_training_mode_or_earlier_clients():
    one = trainer(batch_norm_net())
    values, inputs = one.model.values.clone(), data(300)[0]
    before = one.outputs(values, inputs)
    trained(one, *data())
    assert torch.equal(one.outputs(values, inputs), before)
    assert before.shape == (300, 3)


def test_schedules():
    assert [Exponential(0.5).factor(r, 3) for r in (1, 2, 3)] == [1, 0.5, 0.25]
    assert [Step(2, 0.1).factor(r, 4) for r in (1, 2, 3, 4)] == [1, 1, 0.1, 0.1]
    assert [round(Cosine(0.1).factor(r, 4), 3) for r in (1, 3, 5)] == [1, 0.55, 0.1]
    assert [round(Cosine(warmup=3).factor(r, 9), 3) for r in (1, 2, 3, 4, 7)] == [0.25, 0.5, 0.75, 1, 0.5]
    assert all(Cosine().factor(r, 10) > 0 for r in range(1, 11))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"name": "exponential", "gamma": 1e200}, r"local\.lr_schedule = 'exponential': "),
        ({"name": "builtins:dict"}, "gives a dict, which is no Schedule: it has no factor"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(schedule, message):
    with pytest.raises(ConfigError, match=message):
        plan(lr_schedule=schedule)


class Remembers(nn.Module):
    """Every kind of state that lies outside the flat vector, each of which changes what the next batch gives."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=None)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x):
        self.count += 1
        self.scratch += 0.5
        self.shift = self.shift + 0.25  # replaced, in evaluation too
        self.late = self.scratch if self.late is None else self.late + 1
        return self.norm(self.layer(x)) * (1 + self.count) + self.scratch * x[:, :1] + self.shift + self.late


def test_nothing_that_a_client_leaves_in_the_module_reaches_the_next_one():
    inputs, targets = data()
    fresh = trainer(Remembers(), epochs=1)
    start = fresh.model.values.clone()
    fresh.train(start, inputs, targets, 1, "a")
    expected, outputs = fresh.model.values.clone(), fresh.outputs(start, inputs)
    used = trainer(Remembers(), epochs=1)
    used.outputs(start, inputs)
    used.train(start, *data(30, seed=5), 1, "b")
    used.train(start, inputs, targets, 1, "a")
    assert torch.equal(used.model.values, expected)
    used.train(start, *data(30, seed=6), 2, "c")
    assert torch.equal(used.outputs(start, inputs), outputs)


class Noisy(nn.Module):
    """Draws in training and in evaluation alike."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 3)

    def forward(self, x):
        return self.layer(x).mean((2, 3)) + torch.randn(3)


def test_what_layers_draw_depends_on_the_job_alone():
    images, targets = torch.randn(300, 1, 6, 6), torch.randint(0, 3, (300,))

    def job(one, before):
        start = one.model.values.clone()
        before(one, start)
        one.train(start, images, targets, 3, "a")
        return one.model.values.clone(), one.outputs(start, images, 0)

    fresh = job(trainer(Noisy(), epochs=1), lambda one, start: None)
    used = job(trainer(Noisy(), epochs=1), lambda one, start: one.train(start, images[:50], targets[:50], 2, "b"))
    drawn = job(trainer(Noisy(), epochs=1), lambda one, start: one.outputs(start, images, 256))
    for other in (used, drawn):
        assert all(torch.equal(a, b) for a, b in zip(fresh, other, strict=True))
    one = trainer(Noisy())
    assert not torch.equal(one.outputs(fresh[0], images, 0), one.outputs(fresh[0], images, 256))


def test_another_models_state_is_refused():
    one = trainer()
    with pytest.raises(ModelError, match=r"expected 0\.weight float32\[8, 5\], got 0\.weight float32\[7, 5\]"):
        one.model.load(ModelState.from_module(nn.Sequential(nn.Linear(5, 7))))


def test_a_metric_that_raises_is_named():
    def picky(outputs, targets):
        raise ValueError("only one class is here")

    outputs, targets = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TaskError, match="the metric 'auc' raised ValueError on 4 records: only one class is here"):
        measure(outputs, targets, F.cross_entropy, {"auc": picky})
