"""Operators of our own: a matrix product added into a buffer that exists already.

torch has `addmm_`, but Inductor turns a write in place into computing anew and copying (11.2 ms where `addmm(out=)` took 5.5, and
`mm` then `add_` 7.9; torch 2.13, CPU). An operator that declares the write reaches the compiled code as it stands.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("twobp", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, add_product: Any) -> Any:
    def run(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        add_product(into, a, b, out=into)

    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"twobp::{name}", lambda into, a, b: None, lib=_library)
    return getattr(torch.ops.twobp, name).default


addmm_ = _define("addmm_(Tensor(a!) into, Tensor a, Tensor b) -> ()", torch.addmm)
"""into `(n, p)` += a `(n, m)` @ b `(m, p)`, all of one dtype."""

baddbmm_ = _define("baddbmm_(Tensor(a!) into, Tensor a, Tensor b) -> ()", torch.baddbmm)
"""into `(k, n, p)` += a `(k, n, m)` @ b `(k, m, p)` for each of the k, all of one dtype."""
