"""Measured costs, and what other schedules would take at them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import twobp_fx
from twobp_fx.schedules import build, simulate

WIDTH = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def test_profile_changes_nothing_and_counts_bytes() -> None:
    module = model()
    before = copy.deepcopy(module.state_dict())
    pipe = twobp_fx.compile(module, ["3"], loss_fn=nn.functional.mse_loss, compiler="eager")
    x = torch.randn(8, WIDTH)
    costs = pipe.profile(x, target=x, repeats=2)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in module.parameters())
    microbatch = 4
    assert costs.comm_bytes == (microbatch * WIDTH * 4, 4)  # one activation of float32; the loss
    for name in ("forward", "backward_input", "backward_weight", "backward"):
        times = costs.per_stage(name, 2)
        assert len(times) == 2
        assert all(0 < seconds < 1 for seconds in times)
    assert costs.saved == tuple(program.memory.saved for program in pipe.stages)


def test_simulate_is_the_simulator_on_the_named_plan() -> None:
    pipe = twobp_fx.compile(model(), ["3"], loss_fn=nn.functional.mse_loss, compiler="eager")
    x = torch.randn(8, WIDTH)
    with pytest.raises(twobp_fx.InputError, match="profile"):
        pipe.simulate()
    costs = pipe.profile(x, target=x, repeats=1)
    assert pipe.simulate().makespan == simulate(pipe.plan, costs).makespan
    expected = simulate(build("gpipe", ranks=2, microbatches=6), costs)
    assert pipe.simulate("gpipe", costs=costs, microbatches=6).makespan == expected.makespan
    with pytest.raises(twobp_fx.PlanError, match="known schedules"):
        pipe.simulate("1f1c")


def test_repeats_must_be_positive() -> None:
    pipe = twobp_fx.compile(model(), ["3"], loss_fn=nn.functional.mse_loss, compiler="eager")
    with pytest.raises(twobp_fx.InputError, match="at least once"):
        pipe.profile(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH), repeats=0)
