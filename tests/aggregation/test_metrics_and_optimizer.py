"""Clients' metrics are averaged over those who sent them; the server optimizer moves the model as its paper says."""

import pytest
import torch

from coterie.aggregation import PreconditionError, ServerSGD, mean_metrics


def test_each_metric_is_averaged_over_the_clients_that_sent_it():
    answers = [({"loss": 1.0, "auc": 0.5}, 10), ({"loss": 3.0}, 30), ({"other": 7}, 5)]
    assert mean_metrics(answers) == {"loss": 2.5, "auc": 0.5, "other": 7.0}


def test_a_broken_value_is_left_out_and_costs_nobody_else():
    answers = [({"loss": float("nan"), "acc": 0.5}, 10), ({"loss": 2.0, "acc": "high"}, 30), ({"loss": True}, 10)]
    assert mean_metrics(answers) == {"loss": 2.0, "acc": 0.5}


def test_no_answers_give_no_metrics():
    assert mean_metrics([]) == {}


def test_plain_server_sgd_adds_the_aggregate():
    params, direction = torch.randn(50), torch.randn(50)
    moved, state = ServerSGD().step(params, direction, ServerSGD().init(50))
    assert torch.equal(moved, params + direction)
    assert state == {}


def test_momentum_accumulates():
    optimizer = ServerSGD(lr=0.5, momentum=0.9)
    params, state = torch.zeros(1), optimizer.init(1)
    for _ in range(2):
        params, state = optimizer.step(params, torch.ones(1), state)
    assert params.item() == pytest.approx(0.5 * 1 + 0.5 * 1.9)


def test_the_given_tensors_stay_as_they_are():
    optimizer = ServerSGD(momentum=0.9)
    params, direction, state = torch.ones(3), torch.ones(3), optimizer.init(3)
    optimizer.step(params, direction, state)
    assert torch.equal(params, torch.ones(3))
    assert torch.equal(state["momentum"], torch.zeros(3))


@pytest.mark.parametrize(("lr", "momentum"), [(0, 0), (-1, 0), (1, 1), (1, -0.1), (float("inf"), 0)])
def test_options_out_of_range_are_refused(lr, momentum):
    with pytest.raises(PreconditionError, match="lr > 0 and 0 <= momentum < 1"):
        ServerSGD(lr, momentum)
