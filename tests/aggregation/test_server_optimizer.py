"""The server optimizer moves the model as its paper says, and touches nothing that it was given."""

import pytest
import torch

from coterie.aggregation import PreconditionError, ServerSGD


def test_by_default_it_adds_the_aggregate():
    params, direction = torch.randn(50), torch.randn(50)
    optimizer = ServerSGD()
    moved, state = optimizer.step(params, direction, optimizer.init(50))
    assert torch.equal(moved, params + direction)
    assert state == {}


def test_momentum_accumulates():
    optimizer = ServerSGD(lr=0.5, momentum=0.9)
    params, state = torch.zeros(1), optimizer.init(1)
    for _ in range(2):
        params, state = optimizer.step(params, torch.ones(1), state)
    assert params.item() == pytest.approx(0.5 * 1 + 0.5 * 1.9)
    assert state["momentum"].tolist() == pytest.approx([1.9])


def test_it_agrees_with_torch_sgd():
    """torch minimises: its gradient is the aggregate with the other sign."""
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(20, generator=generator)
    theirs = torch.nn.Parameter(params.clone())
    reference = torch.optim.SGD([theirs], lr=0.3, momentum=0.7)
    optimizer = ServerSGD(lr=0.3, momentum=0.7)
    state = optimizer.init(20)
    for _ in range(5):
        direction = torch.randn(20, generator=generator)
        theirs.grad = -direction
        reference.step()
        params, state = optimizer.step(params, direction, state)
    torch.testing.assert_close(params, theirs.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_given_tensors_stay_as_they_are(momentum):
    optimizer = ServerSGD(momentum=momentum)
    params, direction, state = torch.ones(3), torch.ones(3), optimizer.init(3)
    moved, _ = optimizer.step(params, direction, state)
    moved.fill_(7.0)
    assert params.tolist() == direction.tolist() == [1.0] * 3
    assert all(value.tolist() == [0.0] * 3 for value in state.values())


@pytest.mark.parametrize("lr", [0, -1, float("inf"), float("nan")])
def test_a_learning_rate_out_of_range_is_refused(lr):
    with pytest.raises(PreconditionError, match=rf"ServerSGD\(lr={lr}\): lr must be finite and above 0"):
        ServerSGD(lr)


@pytest.mark.parametrize("momentum", [1, -0.1, float("nan")])
def test_a_momentum_out_of_range_is_refused(momentum):
    with pytest.raises(PreconditionError, match=rf"ServerSGD\(momentum={momentum}\): momentum must be at least 0"):
        ServerSGD(1.0, momentum)


def test_a_direction_of_another_length_is_refused():
    with pytest.raises(PreconditionError, match=r"params of shape \[3\] and a direction of shape \[1\]"):
        ServerSGD().step(torch.zeros(3), torch.ones(1), {})
