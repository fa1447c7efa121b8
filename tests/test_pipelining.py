"""PipelineStage in every schedule of torch.distributed.pipelining: gradients are plain autograd's, over real process groups.

The whole product of families, schedules, rank counts and compilers is `make matrix`; the sample touches each. With
compiler="eager" gradients and buffers must equal plain training's bit by bit, at each of three optimizer steps.
"""

import copy
import functools
import os
import signal
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import twobp_fx
from tests.pipe_helpers import WIDTH, batch, linear, mse
from tests.pipelining_worker import (
    CPU,
    FAMILIES,
    SCHEDULES,
    Chain,
    Failure,
    Part,
    Ranks,
    Schedule,
    engine,
    matches_plain_training,
    optimizer,
    plain_training,
    train,
)
from twobp_fx.errors import InputError

ZERO_BUBBLE = Schedule(SCHEDULES["interleaved-zero-bubble"].engine, "one")
COMPILERS = ("eager", "inductor")


@pytest.fixture(scope="module")
def ranks():
    """Groups of processes by size; the same ones for all tests."""
    made = functools.cache(Ranks)
    groups = [made(count) for count in (2, 4)]
    yield made
    for group in groups:
        group.close()


SAMPLE = [
    ("llama", "gpipe", 2, "eager"),
    ("bert", "interleaved-1f1b", 2, "eager"),
    ("mamba", "looped-bfs", 2, "eager"),
    ("resnet", "zbv", 2, "eager"),
    ("gpt2", "interleaved-zero-bubble", 4, "eager"),
    ("hf-llama", "1f1b", 4, "eager"),
    ("llama", "dualpipe-v", 2, "inductor"),
]


@pytest.mark.parametrize(("family", "schedule", "count", "compiler"), SAMPLE)
def test_training_matches_plain_autograd_sample(ranks, family, schedule, count, compiler):
    ranks(count).run(matches_plain_training, family, schedule, compiler)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_matches_plain_autograd(ranks, family, schedule, count, compiler):
    ranks(count).run(matches_plain_training, family, schedule, compiler)


# Stages of all kinds, as the two in the middle of four.


def view(shape):
    return Part(lambda x: x.view(shape))


def frozen(module):
    return module.requires_grad_(False)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Chain(linear(), nn.Tanh(), linear())

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Counts(nn.Module):
    """Assigns its buffer anew at every call."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) * self.calls


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Breaks(nn.Module):
    """Two graphs of Dynamo's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x.tanh())


STAGES = {
    "a view of the input": lambda: (view((WIDTH, -1)), view((-1, WIDTH))),
    "the input itself": lambda: (Part(lambda x: x), nn.Identity()),
    "a view beside a result": lambda: (
        Part(lambda x, layer: (layer(x), x.view(-1)), linear()),
        Join(lambda a, b: a + b.view_as(a)),
    ),
    "several tensors": lambda: (Part(lambda x, a, b: (a(x), b(x)), linear(), linear()), Join(lambda a, b: a * b)),
    "a mask": lambda: (Part(lambda x, layer: (layer(x), x > 0), linear()), Join(lambda a, mask: a * mask)),
    "indices": lambda: (
        Part(lambda x, layer: (layer(x), x.argsort()), linear()),
        Join(lambda a, index: a.gather(1, index % WIDTH)),
    ),
    "a detached tensor": lambda: (Part(lambda x, layer: (layer(x), x.detach() * 2), linear()), Join(lambda a, b: a * b)),
    "no parameters": lambda: (nn.Tanh(), nn.GELU()),
    "frozen parameters": lambda: (Chain(frozen(linear()), nn.Tanh(), linear()), frozen(linear())),
    "an unused parameter": lambda: (Part(lambda x, used, unused: used(x), linear(), linear()), linear()),
    "a tied parameter": lambda: (Tied(), Tied()),
    # One without momentum breaks the graph. Alone, or in a loop as in a Chain, it would leave the stage uncompiled.
    "batch norm": lambda: (
        Chain(linear(), nn.BatchNorm1d(WIDTH)),
        Part(lambda x, norm, layer: layer(norm(x)), nn.BatchNorm1d(WIDTH, momentum=None), linear()),
    ),
    "a buffer assigned anew": lambda: (Counts(), linear()),
    "a gradient of other strides": lambda: (Part(lambda x, layer: layer(x.t().reshape(-1, WIDTH)), linear()), linear()),
    "a graph break": lambda: (Breaks(), Breaks()),
    "checkpointing": lambda: (Checkpointed(), Checkpointed()),
    "torch's own container": lambda: (nn.Sequential(linear(), nn.ReLU(), linear()), nn.Sequential(linear())),
}


class Join(nn.Module):
    """A layer over a function of several inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = linear()

    def forward(self, *inputs):
        return self.layer(self.function(*inputs))


UNUSED = {
    "an output": lambda: (Part(lambda x, a, b: (a(x), b(x)), linear(), linear()), Join(lambda a, b: a)),
    "an output's gradient": lambda: (Part(lambda x, a, b: (a(x), b(x)), linear(), linear()), Join(lambda a, b: a * b.detach())),
    "the only gradient": lambda: (linear(), Join(lambda x: x.detach())),
}


def trains_as_plainly(make, schedule, compiler, missing_is_zero=False):
    torch.manual_seed(0)
    chain = Chain(linear(), *make(), linear())
    torch.manual_seed(0)
    plain = Chain(linear(), *make(), linear())
    x, target = batch(16)
    expected = plain_training(plain, mse, x, target, microbatches=4)
    if missing_is_zero:
        like = dict(plain.named_parameters())
        expected = [{n: torch.zeros_like(like[n]) if v is None else v for n, v in state.items()} for state in expected]
    how = SCHEDULES[schedule]
    runs = engine(how, list(chain.parts), 4, mse, compiler)
    own = [chain.parts[i] for i in how.stages_of(dist.get_rank(), dist.get_world_size())]
    train(runs, chain, own, x, target, expected, exact=compiler == "eager")


def stage_trains_as_plainly(stage, schedule, compiler):
    trains_as_plainly(STAGES[stage], schedule, compiler)


def what_is_unused_gets_zeros(unused, schedule, compiler):
    trains_as_plainly(UNUSED[unused], schedule, compiler, missing_is_zero=True)


MIDDLE = ["interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


@pytest.mark.parametrize("schedule", MIDDLE)
@pytest.mark.parametrize("stage", STAGES)
def test_stage(ranks, stage, schedule):
    ranks(2).run(stage_trains_as_plainly, stage, schedule, "eager")


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", MIDDLE)
@pytest.mark.parametrize("stage", STAGES)
def test_stage_inductor(ranks, stage, schedule):
    ranks(2).run(stage_trains_as_plainly, stage, schedule, "inductor")


@pytest.mark.parametrize("schedule", MIDDLE)
@pytest.mark.parametrize("unused", UNUSED)
def test_what_the_next_stage_does_not_use(ranks, unused, schedule):
    """Torch's engine sends a gradient of zeros where there is none."""
    ranks(2).run(what_is_unused_gets_zeros, unused, schedule, "eager")


# What runs, and how often.


def counting(graphs, operators):
    """A compiler: counts runs of graphs (F, B, I, W) and of operators. Of stages of two linear layers, with biases, and a tanh."""

    def compiler(module, example_inputs):
        names = Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        if names["aten.addmm.default"]:
            graph = "F"
        elif not names["aten.tanh_backward.default"]:
            graph = "W"
        else:
            graph = "B" if names["aten.mm.default"] > 2 else "I"

        def run(*args):
            graphs[graph] += 1
            operators.update(names)
            return module(*args)

        return run

    return compiler


def counts_of_a_step(how, make, microbatches):
    """Runs of graphs and operators in the second step: in the first, torch also looks at what the stages return."""
    graphs, operators = Counter(), Counter()
    ranks = dist.get_world_size()
    stages = [make() for _ in range(how.count(ranks))]
    runs = engine(how, stages, microbatches, mse, counting(graphs, operators))
    x, target = batch(4 * microbatches)
    runs.step(x, target=target)
    graphs.clear()
    operators.clear()
    runs.step(x, target=target)
    return dict(graphs), operators


def hidden(width=WIDTH):
    return Chain(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def graphs_of_a_step(how, microbatches):
    graphs, _ = counts_of_a_step(how, hidden, microbatches)
    return graphs


@pytest.mark.parametrize("count", [2, 4])
def test_each_half_runs_once_a_microbatch(ranks, count):
    first, *others = ranks(count).run(graphs_of_a_step, ZERO_BUBBLE, 8)
    assert first == {"F": 8, "B": 8}  # torch runs the first stage's whole backward at W
    assert others == [{"F": 8, "I": 8, "W": 8}] * (count - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_unsplit_backward_runs_whole(ranks, schedule):
    assert ranks(2).run(graphs_of_a_step, SCHEDULES[schedule], 4) == [{"F": 4, "B": 4}] * 2


def test_both_kinds_of_backward_in_one_schedule(ranks):
    _, graphs = ranks(2).run(graphs_of_a_step, SCHEDULES["dualpipe-v"], 4)  # rank 1 has the two stages in the middle
    assert graphs["F"] == 8
    assert graphs["I"] == graphs["W"] > 0
    assert graphs["B"] > 0
    assert graphs["I"] + graphs["B"] == 8


def operators_of_a_step(how, make, names):
    _, operators = counts_of_a_step(how, make, 4)
    return [operators[name] for name in names]


class CheckpointedSine(nn.Module):
    """A block that is recomputed. Its sine is saved by none, so that it runs in F, and where the block is recomputed."""

    def __init__(self):
        super().__init__()
        self.inner = Chain(linear(), Part(torch.sin), linear(), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_a_checkpointed_block_is_recomputed_once(ranks, how):
    """Counted in the graphs that the compiler was given: once a micro-batch in F, once more in the backward."""
    found = ranks(2).run(operators_of_a_step, how, CheckpointedSine, ["aten.sin.default", "aten.cos.default"])
    assert found == [[8, 4]] * 2


def graphs_of_many_stages(count):
    graphs = Counter()
    stages = [hidden() for _ in range(2 * count)]
    own = range(dist.get_rank(), len(stages), 2)
    made = [twobp_fx.PipelineStage(stages[i], i, len(stages), CPU, compiler=counting(graphs, Counter())) for i in own]
    runs = SCHEDULES["looped-bfs"].engine(made, 2, loss_fn=mse)
    x, target = batch(4)
    runs.step(x, target=target)
    graphs.clear()
    runs.step(x, target=target)
    return graphs


def test_more_stages_than_dynamo_would_recompile_one_function(ranks):
    count = torch._dynamo.config.recompile_limit + 2
    assert ranks(2).run(graphs_of_many_stages, count) == [{"F": 2 * count, "B": 2 * count}] * 2


# Data parallel: two pipelines of two stages.


@functools.cache
def mesh():
    """Ranks 0 and 1 are a pipeline, 2 and 3 another; 0 and 2 are replicas, 1 and 3 are others."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))


class TiedOverGraphs(nn.Module):
    """One backward reaches the weight on two ways, so that its gradient is computed in I."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = linear(), linear()

    def forward(self, x):
        x = self.layer(x).tanh()
        torch._dynamo.graph_break()
        return self.other(self.layer(x))


REPLICAS = {
    "one bucket": (hidden, {}),
    "several buckets": (lambda: hidden(512), {"bucket_cap_mb": 1}),
    "buckets hold the gradients": (hidden, {"gradient_as_bucket_view": True}),
    "an unused parameter": (lambda: Part(lambda x, used, unused: used(x), linear(), linear()), {"find_unused_parameters": True}),
    "a gradient of I": (TiedOverGraphs, {}),
}


def replicas_train_as_one_process(how, replica):
    make, options = REPLICAS[replica]
    pipeline, replicas = mesh().get_group("pipeline"), mesh().get_group("replica")
    microbatches = 4
    torch.manual_seed(0)
    model = Chain(make(), make())
    x, target = torch.randn(2, 32, next(model.parameters()).shape[-1])
    expected = plain_training(copy.deepcopy(model), mse, x, target, 2 * microbatches)
    own = model.parts[dist.get_rank(pipeline)]
    wrapped = DistributedDataParallel(own, process_group=replicas, **options)
    reduced = Counter()

    def hook(_, bucket):
        reduced.update(bucket.parameters())
        return dist.all_reduce(bucket.buffer().div_(2), group=replicas, async_op=True).get_future().then(lambda f: f.value()[0])

    wrapped.register_comm_hook(None, hook)
    runs = engine(how, [wrapped] * 2, microbatches, mse, "eager", pipeline)
    half = dist.get_rank(replicas)
    train(runs, model, [own], x.chunk(2)[half], target.chunk(2)[half], expected, exact=False)
    return [reduced[parameter] / len(expected) for parameter in own.parameters()]


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_replicas_reduce_each_parameter_once_a_step(ranks, how, replica):
    for reduced in ranks(4).run(replicas_train_as_one_process, how, replica):
        assert set(reduced) == {1}


def hooks_of_a_step(how):
    pipeline, replicas = mesh().get_group("pipeline"), mesh().get_group("replica")
    own = hidden()
    calls = Counter()
    for name, parameter in own.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.update([name]))
    wrapped = DistributedDataParallel(own, process_group=replicas)
    runs = engine(how, [wrapped] * 2, 4, mse, "eager", pipeline)
    x, target = batch(16)
    runs.step(x, target=target)
    return list(calls.values())


@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_a_hook_of_a_replica_fires_once_a_microbatch(ranks, how):
    assert ranks(4).run(hooks_of_a_step, how) == [[4] * 4] * 4


def shards_train_as_one_process(how):
    torch.manual_seed(0)
    model = Chain(hidden(), hidden())
    x, target = batch(32)
    expected = plain_training(copy.deepcopy(model), mse, x, target, 8)
    stage, half = mesh().get_local_rank("pipeline"), mesh().get_local_rank("replica")
    own = fully_shard(model.parts[stage], mesh=mesh()["replica"])
    graphs = Counter()
    runs = engine(how, list(model.parts), 4, mse, counting(graphs, Counter()), mesh().get_group("pipeline"))
    updates = optimizer(own.parameters())
    for state in expected:
        graphs.clear()
        updates.zero_grad()
        runs.step(x.chunk(2)[half], target=target.chunk(2)[half])
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), state[f"parts.{stage}.{name}"])
        updates.step()
    return graphs


def test_sharded_parameters(ranks):
    assert (
        ranks(4).run(shards_train_as_one_process, Schedule(SCHEDULES["interleaved-1f1b"].engine, "one")) == [{"F": 4, "B": 4}] * 4
    )


def test_sharded_parameters_with_a_split_backward(ranks):
    assert ranks(4).run(shards_train_as_one_process, ZERO_BUBBLE) == [{"F": 4, "B": 4}, {"F": 4, "I": 4, "W": 4}] * 2


# Around the step.


class Scaled(nn.Module):
    """Takes a keyword argument; every stage of an engine is given all of them."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x, scale):
        return self.layer(x) * scale


def takes_keyword_arguments(how):
    torch.manual_seed(0)
    model = Chain(*(Scaled() for _ in range(how.count(2))))
    plain = copy.deepcopy(model)
    x, target = batch(16)
    scale = torch.randn(16, 1)
    runs = engine(how, list(model.parts), 4, mse, "eager")
    runs.step(x, target=target, scale=scale)
    for part, wanted, factor in zip(x.chunk(4), target.chunk(4), scale.chunk(4), strict=True):
        for stage in plain.parts:
            part = stage(part, factor)
        (mse(part, wanted) / 4).backward()
    for i in how.stages_of(dist.get_rank(), 2):
        for found, expected in zip(model.parts[i].parameters(), plain.parts[i].parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)


def trains_under_autocast(how):
    torch.manual_seed(0)
    model = Chain(*(hidden() for _ in range(how.count(2))))
    x, target = batch(16)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # which would keep casts over optimizer steps
        expected = plain_training(copy.deepcopy(model), mse, x, target, 4)
        runs = engine(how, list(model.parts), 4, mse, "eager")
        train(runs, model, [model.parts[i] for i in how.stages_of(dist.get_rank(), 2)], x, target, expected, exact=True)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return nn.functional.dropout(torch.ones_like(x) + 0 * x) * self.weight


def gradient_is_of_the_draws(how):
    """With a sum for a loss, the gradient of a factor of one is the sum of what it was multiplied with."""
    stages = [Dropped() for _ in range(2)]
    runs = engine(how, stages, 4, lambda output, target: output.sum(), "eager")
    x, target = batch(16)
    found = runs.step(x, target=target)
    if found is not None:
        torch.testing.assert_close(stages[-1].weight.grad, found.sum(dim=0) / 4)
        assert 0 < (found == 0).sum() < found.numel()


@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE, SCHEDULES["zbv"]], ids=["1f1b", "zero bubble", "zbv"])
@pytest.mark.parametrize("case", [takes_keyword_arguments, trains_under_autocast])
def test_a_step(ranks, case, how):
    ranks(2).run(case, how)


@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_the_backward_uses_the_draws_of_the_forward(ranks, how):
    ranks(2).run(gradient_is_of_the_draws, how)


# Evaluation, and what goes wrong.


def evaluates_between_steps(how):
    torch.manual_seed(0)
    model = Chain(*(Chain(linear(), nn.BatchNorm1d(WIDTH)) for _ in range(how.count(2))))
    plain = copy.deepcopy(model)
    x, target = batch(16)
    runs = engine(how, list(model.parts), 4, mse, "eager")
    runs.step(x, target=target)
    for part in x.chunk(4):
        plain(part)
    found = runs.eval(x, target=target)
    expected = torch.cat([plain(part) for part in x.chunk(4)])
    assert found is None or torch.equal(found, expected)
    runs.step(x, target=target)
    return found is not None


@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
def test_evaluation_between_steps(ranks, how):
    assert ranks(2).run(evaluates_between_steps, how) == [False, True]


def warnings_of_stages(other):
    """Of two steps, if the stages were compiled by another backend before, or not."""
    stages = [linear() for _ in range(2)]
    for stage in stages:
        if other is not None:
            stage.compile(backend=other)
    runs = engine(ZERO_BUBBLE, stages, 4, mse, "eager")
    x, target = batch(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            runs.step(x, target=target)
    return [line for each in caught if "for W" in (line := str(each.message).split(":")[0])]


def test_a_stage_that_leaves_nothing_for_w_warns_once(ranks):
    # The first stage, whose input wants no gradient, is never asked for I.
    assert ranks(2).run(warnings_of_stages, "aot_eager") == [[], ["Stage 1 leaves nothing for W"]]
    assert ranks(2).run(warnings_of_stages, None) == [[], []]


def test_an_unknown_compiler_is_refused():
    with pytest.raises(InputError, match="compiler='inductorr' is unknown"):
        twobp_fx.PipelineStage(linear(), 0, 1, CPU, compiler="inductorr")


def test_dw_builder_is_refused():
    with pytest.raises(InputError, match="leave out dw_builder"):
        twobp_fx.PipelineStage(linear(), 0, 1, CPU, dw_builder=lambda: lambda: None)


def fails_in_the_middle(how, fail):
    """The last rank's third loss of the second step does not come out."""
    runs = engine(how, [linear() for _ in range(2)], 4, LossOf(fail, 4 + 3), "eager")
    x, target = batch(16)
    for _ in range(2):
        runs.step(x, target=target)


class LossOf:
    def __init__(self, fail, at):
        self.calls = 0
        self.fail, self.at = fail, at

    def __call__(self, output, target):
        self.calls += 1
        if self.calls == self.at:
            self.fail()
        return mse(output, target)


def raises():
    raise ZeroDivisionError("in the third loss")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", [SCHEDULES["1f1b"], ZERO_BUBBLE], ids=["1f1b", "zero bubble"])
@pytest.mark.parametrize(("fail", "text"), [(raises, "in the third loss"), (is_killed, "exit code -9")])
def test_others_get_an_error_when_a_rank_fails(how, fail, text):
    group = Ranks(2, timeout=5)
    first, last = group.outcomes(fails_in_the_middle, how, fail, limit=60)
    assert isinstance(first, Failure)
    assert "still busy" not in first.text
    assert "exit code" not in first.text
    assert isinstance(last, Failure)
    assert text in last.text
    assert group.run(dist.get_rank) == [0, 1]  # in new processes
    group.close()
