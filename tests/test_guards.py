"""What a capture depends on, as keys: equal where the capture may be used again, and made of anything a user may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from twobp_fx.guards import attributes, by_value_or_identity


def counting_down(step: int) -> Callable[[int], int]:
    """A function whose closure holds itself."""

    def count(n: int) -> int:
        return 0 if n <= 0 else count(n - step)

    return count


class Squares(Mapping[int, Any]):
    """Makes its values when they are asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __getitem__(self, key: int) -> list[int]:
        return [key * key]


def test_a_function_whose_closure_holds_itself() -> None:
    count = counting_down(2)
    assert by_value_or_identity(count) == by_value_or_identity(count)
    assert by_value_or_identity(count) != by_value_or_identity(counting_down(3))


def test_a_wrapper_that_is_its_own_wrapped_function() -> None:
    def call(x: object) -> object:
        return x

    call.__kwdefaults__ = {"self": call}
    assert by_value_or_identity(call) == by_value_or_identity(call)


def test_the_same_code_over_the_same_values_is_one_function() -> None:
    def scaling(factor: float) -> Callable[[float], float]:
        return lambda x: x * factor

    assert by_value_or_identity(scaling(2.0)) == by_value_or_identity(scaling(2.0))
    assert by_value_or_identity(scaling(2.0)) != by_value_or_identity(scaling(3.0))


def test_values_made_on_the_way_are_told_apart() -> None:
    """Their ids may be used again as soon as they are gone."""
    model = nn.Module()
    for i in range(20):
        setattr(model, f"squares{i}", Squares(i))
        setattr(model, f"function{i}", (lambda power: lambda x: x**power)(i))
    keys = attributes(model)
    squares = {keys["", f"squares{i}"] for i in range(20)}
    functions = {keys["", f"function{i}"] for i in range(20)}
    assert len(squares) == len(functions) == 20


def test_containers_that_hold_themselves() -> None:
    held: list[object] = [1]
    held.append(held)
    assert by_value_or_identity(held) == by_value_or_identity(held)
    assert by_value_or_identity({"a": {1, 2}}) == by_value_or_identity({"a": {2, 1}})
    assert by_value_or_identity({"a": {1, 2}}) != by_value_or_identity({"a": {2, 3}})


def test_tensors_and_modules_are_known_by_identity() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    assert by_value_or_identity([one]) == by_value_or_identity([one]) != by_value_or_identity([other])
    assert by_value_or_identity(nn.ReLU()) != by_value_or_identity(nn.ReLU())
