"""Processes that form a gloo group and run what tests send them; and the models and schedules of the pipelining tests."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
from torch import Tensor, nn

import twobp_fx
from examples import bert, llama, mamba, resnet

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Failure:
    """How a rank failed: its traceback, or how it ended."""

    text: str


class Ranks:
    """`count` processes in one gloo group, which stay for many cases; after a case that fails, the next gets new ones.

    timeout: seconds after which a rank that waits for another gives up.
    """

    def __init__(self, count: int, timeout: float = 60) -> None:
        self.count = count
        self._timeout = timeout
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """What `case(*args)` returns on each rank. Raises AssertionError with the tracebacks of all ranks that failed."""
        results = self.outcomes(case, *args, grace=2)
        failed = [f"rank {rank}: {result.text}" for rank, result in enumerate(results) if isinstance(result, Failure)]
        if failed:
            raise AssertionError("\n".join(failed))
        return results

    def outcomes(self, case: Callable[..., Any], *args: Any, limit: float = 300, grace: float | None = None) -> list[Any]:
        """As `run`, but a rank's failure is a result as well.

        limit: seconds that all ranks have; grace: that they have once one has failed, when not so many as before.
        """
        self._start()
        message = pickle.dumps((case, args))
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(message)
        results: dict[int, Any] = {}
        end = time.monotonic() + limit
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(waiting.values(), max(0.0, end - time.monotonic()))
            if not ready:
                results |= dict.fromkeys(waiting, Failure("was still busy, and was ended"))
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                results[rank] = self._receive(rank)
                del waiting[rank]
                if isinstance(results[rank], Failure) and grace is not None:
                    end = min(end, time.monotonic() + grace)
        if any(isinstance(result, Failure) for result in results.values()):
            self.close()
        return [results[rank] for rank in range(self.count)]

    def close(self) -> None:
        """End the processes: those that wait for a case by themselves, the others by force."""
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + 1
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")  # which imports torch once for all
        context.set_forkserver_preload([__name__, "torch.distributed.pipelining", "torch._dynamo", "torch._inductor.compile_fx"])
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name, "store")
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, str(store), self._timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _receive(self, rank: int) -> Any:
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return Failure(f"ended with exit code {self._processes[rank].exitcode}")


def _serve(rank: int, count: int, store: str, timeout: float, connection: Connection) -> None:
    """The life of one process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # not: run on, uncompiled
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # a whole schedule for each error
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            case, args = pickle.loads(message)
            torch.manual_seed(0)
            with _warnings_are_errors():
                result = case(*args)
        except Exception:
            result = Failure(traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            connection.send(result)


@contextlib.contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)  # Inductor's own imports
        warnings.filterwarnings("ignore", message=".*grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
        yield


# The models, in parts.


@dataclass(frozen=True)
class Family:
    """A model in parts, each a function of one tensor; how its loss is computed; a batch of n: (x, target)."""

    parts: Sequence[nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]


class Part(nn.Module):
    """A function of a tensor and of the modules given here."""

    def __init__(self, function: Callable[..., Tensor], *owned: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.owned = nn.ModuleList(owned)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.owned)


class Chain(nn.Module):
    """Modules one after the other; a tuple is several arguments of the next. (torch compiles no nn.Sequential in place.)"""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any) -> Any:
        for part in self.parts:
            result = part(*args)
            args = result if isinstance(result, tuple) else (result,)
        return result


def _example(
    module: ModuleType, parts: Callable[[Any], Sequence[nn.Module]], dtype: torch.dtype = torch.float32, **sizes: Any
) -> Family:
    model = module.build(**sizes).to(dtype)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        (x,), target = module.example_batch(model, batch=size)
        return x.to(dtype) if x.is_floating_point() else x, target

    return Family(parts(model), module.loss_fn, batch)


def _language_model(model: Any) -> list[nn.Module]:
    return [model.tokens, *model.blocks, Chain(model.norm, model.head)]


def _bert_parts(model: Any) -> list[nn.Module]:
    return [model.embedding, *(Part(lambda x, block: block(x, None), block) for block in model.blocks), model.head]


def _resnet_parts(model: Any) -> list[nn.Module]:
    return [model.stem, *model.blocks, Part(lambda x, head: head(x.mean(dim=(2, 3))), model.head)]


def _transformers(name: str, depth: int) -> Family:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "tie_word_embeddings": False}
    if name == "gpt2":
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=depth, n_embd=16, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
            )
        )
        body = gpt2.transformer
        parts = [
            Part(lambda x, tokens, places: tokens(x) + places(torch.arange(x.shape[1], device=x.device)), body.wte, body.wpe),
            *(Part(_first_of, block) for block in body.h),
            Chain(body.ln_f, gpt2.lm_head),
        ]
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=depth, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, **sizes
            )
        )
        body = model.model
        parts = [
            body.embed_tokens,
            *(Part(_rotated, layer, body.rotary_emb) for layer in body.layers),
            Chain(body.norm, model.lm_head),
        ]

    def batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(64, (size, 9), generator=torch.Generator().manual_seed(0))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Family(parts, llama.loss_fn, batch)


def _first_of(x: Tensor, block: nn.Module) -> Tensor:
    result = block(x)
    return result[0] if isinstance(result, tuple) else result


def _rotated(x: Tensor, layer: nn.Module, rotary: nn.Module) -> Tensor:
    result = layer(x, position_embeddings=rotary(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0)))
    return result[0] if isinstance(result, tuple) else result


FAMILIES: dict[str, Callable[[int], Family]] = {
    "llama": lambda depth: _example(llama, _language_model, width=16, depth=depth, heads=2, hidden=32, length=8, vocab=64),
    "bert": lambda depth: _example(bert, _bert_parts, width=16, depth=depth, heads=2, length=8, vocab=64),
    "mamba": lambda depth: _example(mamba, _language_model, width=16, depth=depth, state=4, length=8, vocab=64),
    # In double precision: a ReLU's input that is all but zero has either sign by rounding, which later steps show.
    "resnet": lambda depth: _example(resnet, _resnet_parts, torch.float64, layers=(1, depth - 1), width=4, classes=10, image=32),
    "gpt2": lambda depth: _transformers("gpt2", depth),
    "hf-llama": lambda depth: _transformers("llama", depth),
}
"""By name; of so many blocks, each a part, between a first and a last part."""


# The schedules.


@dataclass(frozen=True)
class Schedule:
    """One of torch's; where its stages are: one a rank, or two, in a loop or a V.

    reverse: whether it begins the backwards with the last micro-batch.
    """

    engine: Any
    placement: str
    reverse: bool = False

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        return {"one": [rank], "loop": [rank, rank + ranks], "v": [rank, 2 * ranks - 1 - rank]}[self.placement]

    def count(self, ranks: int) -> int:
        """How many stages there are."""
        return ranks if self.placement == "one" else 2 * ranks


SCHEDULES = {
    "gpipe": Schedule(torch_schedules.ScheduleGPipe, "one"),
    "1f1b": Schedule(torch_schedules.Schedule1F1B, "one"),
    "interleaved-1f1b": Schedule(torch_schedules.ScheduleInterleaved1F1B, "loop"),
    "looped-bfs": Schedule(torch_schedules.ScheduleLoopedBFS, "loop", reverse=True),
    "interleaved-zero-bubble": Schedule(torch_schedules.ScheduleInterleavedZeroBubble, "loop"),
    "zbv": Schedule(torch_schedules.ScheduleZBVZeroBubble, "v"),
    "dualpipe-v": Schedule(torch_schedules.ScheduleDualPipeV, "v"),
}


def engine(
    schedule: Schedule,
    modules: Sequence[nn.Module],
    microbatches: int,
    loss_fn: Callable[..., Tensor],
    compiler: Any,
    group: Any = None,
) -> Any:
    """This rank's part of a pipeline of `modules`, one a stage."""
    own = schedule.stages_of(dist.get_rank(group), dist.get_world_size(group))
    stages = [twobp_fx.PipelineStage(modules[i], i, len(modules), CPU, group=group, compiler=compiler) for i in own]
    single = issubclass(schedule.engine, torch_schedules.PipelineScheduleSingle)
    return schedule.engine(stages[0] if single else stages, microbatches, loss_fn=loss_fn)


# What plain autograd and a plain optimizer do.

STEPS = 3


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(parameters)}], lr=0.05, momentum=0.9)  # which may be none


def plain_training(
    model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor, target: Tensor, microbatches: int, reverse: bool = False
) -> list[dict[str, Tensor | None]]:
    """The gradients and the buffers of each step, by name. Trains `model`."""
    updates = optimizer(p for p in model.parameters() if p.requires_grad)
    found = []
    for _ in range(STEPS):
        updates.zero_grad()
        pairs = zip(x.chunk(microbatches), target.chunk(microbatches), strict=True)
        losses = [loss_fn(model(part), wanted) for part, wanted in pairs]
        for loss in reversed(losses) if reverse else losses:
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(microbatches)
        found.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
            | {name: buffer.clone() for name, buffer in model.named_buffers()}
        )
        updates.step()
    return found


def assert_state(found: Tensor | None, expected: Tensor | None, name: str, exact: bool) -> None:
    assert (found is None) == (expected is None), f"{name}: {'None' if found is None else 'a tensor'}, unlike eager"
    if found is not None and expected is not None:
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
        torch.testing.assert_close(found, expected, msg=lambda m: f"{name}: {m}", **tolerance)


# Cases.


def train(
    runs: Any, model: nn.Module, modules: Sequence[nn.Module], x: Tensor, target: Tensor, expected: Sequence[Any], exact: bool
) -> None:
    """Train this rank's modules; after each step their gradients and buffers are as expected, by their names in the model."""
    own = [parameter for module in modules for parameter in module.parameters()]
    updates = optimizer(p for p in own if p.requires_grad)
    for step, state in enumerate(expected):
        updates.zero_grad()
        runs.step(x, target=target)
        names = {each: name for name, each in [*model.named_parameters(), *model.named_buffers()]}
        for parameter in own:
            assert_state(parameter.grad, state[names[parameter]], f"step {step}, gradient of {names[parameter]}", exact)
        for module in modules:
            for buffer in module.buffers():
                assert_state(buffer, state[names[buffer]], f"step {step}, buffer {names[buffer]}", exact)
        updates.step()


@functools.lru_cache(maxsize=4)
def _compiled_family(family: str, stages: int, compiler: str) -> tuple[Family, Chain, dict[str, Tensor]]:
    """A family, its stages (compiled once for all schedules), and their state at the start."""
    torch.manual_seed(0)
    made = FAMILIES[family](max(2, stages - 2))
    each = len(made.parts) // stages
    model = Chain(*(Chain(*made.parts[i * each : (i + 1) * each]) for i in range(stages)))
    return made, model, {name: value.clone() for name, value in model.state_dict().items()}


@functools.lru_cache(maxsize=4)
def _plain_family(family: str, stages: int, microbatches: int, reverse: bool) -> list[dict[str, Tensor | None]]:
    """What plain training of it does."""
    made, model, _ = _compiled_family.__wrapped__(family, stages, "eager")
    return plain_training(model, made.loss_fn, *made.batch(2 * microbatches), microbatches, reverse)


def matches_plain_training(family: str, schedule: str, compiler: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    how = SCHEDULES[schedule]
    stages = how.count(ranks)
    microbatches = 2 * ranks
    made, model, start = _compiled_family(family, stages, compiler)
    model.load_state_dict(start)
    runs = engine(how, list(model.parts), microbatches, made.loss_fn, compiler)
    own = [model.parts[i] for i in how.stages_of(rank, ranks)]
    expected = _plain_family(family, stages, microbatches, how.reverse)
    train(runs, model, own, *made.batch(2 * microbatches), expected, exact=compiler == "eager")
