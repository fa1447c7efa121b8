"""A step under every schedule of the catalog, by name: gradients equal plain autograd's on the same micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import twobp_fx
from twobp_fx.schedules import SCHEDULES

STAGES = 4


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(STAGES) for layer in (nn.Linear(6, 6), nn.Tanh())))
    expected = copy.deepcopy(model)
    pipe = twobp_fx.compile(model, STAGES, loss_fn=nn.functional.mse_loss, schedule=name, compiler="eager")
    count = pipe.plan.microbatches
    x, y = torch.randn(2 * count, 6), torch.randn(2 * count, 6)
    loss = pipe.step(x, target=y)
    losses = [nn.functional.mse_loss(expected(a), b) / count for a, b in zip(x.chunk(count), y.chunk(count), strict=True)]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(loss, torch.stack(losses).sum().detach())
    for (fqn, parameter), reference in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


@pytest.mark.parametrize("name", sorted(name for name, schedule in SCHEDULES.items() if schedule.chunks > 1))
def test_stages_that_do_not_divide_into_chunks(name: str) -> None:
    with pytest.raises(twobp_fx.PlanError, match=r"stages on each rank: give a multiple of"):
        twobp_fx.compile(nn.Linear(2, 2), 3, schedule=name)
