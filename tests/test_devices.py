"""Placing stages on devices. Without an accelerator, the graphs are checked as traced for two meta devices."""

import copy

import pytest
import torch
from torch import nn

import twobp_fx
from twobp_fx.passes.graph import placeholders
from twobp_fx.program import Role


class Positions(nn.Module):
    """Makes a tensor on its input's device in the forward, as models with position ids do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Positions(), nn.Linear(4, 4), Positions(), nn.Linear(4, 4))


def test_each_stage_is_traced_for_its_own_device() -> None:
    x = torch.randn(2, 8, 4)
    pipe = twobp_fx.compile(
        model(),
        ["2"],
        loss_fn=lambda output, target: (output - target).square().mean(),
        example_args=(x,),
        example_kwargs={"target": x},
        compiler="eager",
        devices=["meta:0", "meta:1"],
    )
    for index, program in enumerate(pipe.stages):
        device = torch.device("meta", index)
        for _, graph in program.graphs.items():
            assert {node.meta["val"].device for node in placeholders(graph.graph)} <= {device}
            named = {
                argument
                for node in graph.graph.nodes
                for argument in (*node.args, *node.kwargs.values())
                if isinstance(argument, torch.device)
            }
            assert named <= {device}
        arange = [node for node in program.graphs.forward.graph.nodes if node.target is torch.ops.aten.arange.default]
        assert [node.kwargs["device"] for node in arange] == [device]
        sent = [value for value in program.signatures["forward"].returns if value.role is Role.SENT]
        assert {value.device for value in sent} == {device}


def test_one_device_a_rank() -> None:
    with pytest.raises(twobp_fx.InputError, match="one a rank"):
        twobp_fx.compile(model(), 2, devices=["cpu"])


@pytest.mark.parametrize("schedule", ["1f1b-1", "gpipe"])
def test_devices_named_outright_give_the_same_gradients(schedule: str) -> None:
    kinds = ["cpu"]
    if torch.accelerator.is_available():
        kinds.append(str(torch.accelerator.current_accelerator()))
    x = torch.randn(4, 8, 4)
    plain = model()
    for part in x.chunk(2):
        (nn.functional.mse_loss(plain(part), part) / 2).backward()
    for kind in kinds:
        piped = copy.deepcopy(plain)
        piped.zero_grad()
        pipe = twobp_fx.compile(
            piped, 2, loss_fn=nn.functional.mse_loss, schedule=schedule, compiler="eager", devices=[kind, "cpu"]
        )
        pipe.step(x, target=x)
        for (name, parameter), expected in zip(piped.named_parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad.cpu(), expected.grad, msg=name)
