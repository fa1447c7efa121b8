"""Capture: a model and its loss into one forward graph (torch.export), and a stage's forward into a joint graph (AOTAutograd)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind

from .errors import CaptureError, InputError, TwobpError
from .export_checks import (
    ChangedAttributes,
    StrictTracing,
    refuse_autograd_functions,
    refuse_backward_hooks,
    refuse_carried_state,
    refuse_changed_attributes,
    refuse_functorch_transforms,
)
from .guards import PLAIN
from .inputs import Inputs
from .passes.cut_stages import Source, SourceKind, StageGraph
from .passes.graph import has_effect, outputs, placeholders, storage_key

LOSS_PREFIX = "(loss_fn)."
"""Before the FQNs of a loss module's parameters and buffers: no model's FQN begins like this."""
_ASSERTIONS = (torch.ops.aten._assert_tensor_metadata.default,)


@dataclass(frozen=True, slots=True)
class Captured:
    """A model's forward as one graph.

    Every placeholder of `module` carries `meta["source"]`. `output_names` are the values it returns, one a tensor of what the model
    returned (`outputs`: its template and tree); `constants` the tensors that tracing met and that are no parameters or buffers.
    """

    module: fx.GraphModule
    outputs: Inputs
    output_names: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]


class _Recorded:
    """What the traced forward returned and changed. Not attributes of the module itself: export resets those."""

    def __init__(self) -> None:
        self.outputs: Inputs | None = None
        self.changed: dict[str, ChangedAttributes] = {}


class _Model(nn.Module):
    """The model as a function of flat tensors that returns flat tensors; with a loss, the loss alone."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, inputs: Inputs, want_loss: bool) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.inputs = inputs
        self.want_loss = want_loss
        self.recorded = _Recorded()
        self.train(model.training)

    def train(self, mode: bool = True) -> _Model:
        self.training = mode  # the model's own modes stay what they are, module by module
        return self

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs, target = self.inputs.unflatten(tensors)
        with contextlib.ExitStack() as stack:
            for name, owner in (("model", self.model), ("loss_fn", self.loss_fn)):
                if isinstance(owner, nn.Module):
                    changed = self.recorded.changed.setdefault(name, ChangedAttributes())
                    stack.enter_context(refuse_changed_attributes(owner, changed))
            stack.enter_context(StrictTracing())
            result = self.model(*args, **kwargs)
            if self.want_loss:
                result = loss_of(result) if self.loss_fn is None else self.loss_fn(result, target)
                _check_loss(result, self.loss_fn)
        flat = Inputs.flatten(result)
        for leaf in flat.others:
            if not isinstance(leaf, PLAIN):
                raise CaptureError(
                    f"The model returns a {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither a tensor nor a "
                    "registered container of tensors. Return tensors, lists, tuples or dicts (for transformers models: pass "
                    "use_cache=False), or register the class with torch.utils._pytree.register_pytree_node."
                )
        self.recorded.outputs = flat
        return flat.tensors


def loss_of(result: Any) -> Any:
    """The loss in what a model returned: the result itself, its `.loss`, or its 'loss' entry."""
    if isinstance(result, torch.Tensor):
        return result
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, Mapping):
        loss = result.get("loss")
    return loss


def _check_loss(loss: Any, loss_fn: object) -> None:
    origin = "The model's output" if loss_fn is None else "What loss_fn returns"
    remedy = (
        "Pass loss_fn=..., a function (output, target) -> scalar, or let the model return its loss (or an object with .loss)."
        if loss_fn is None
        else "Return one number a micro-batch, for instance by .mean()."
    )
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"{origin} holds no loss (it is {type(loss).__name__}). {remedy}")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise InputError(
            f"{origin} is no scalar loss: it has shape {list(loss.shape)} and dtype {loss.dtype}, where a 0-dimensional "
            f"floating-point tensor is needed. {remedy}"
        )


def capture_forward(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    want_loss: bool = True,
    device: torch.device | None = None,
) -> Captured:
    """Capture `model` in its present mode, called with `inputs` (trees: args, kwargs, target), into one graph.

    Nothing is run on real data. device: capture as if everything were there; None for where it is.
    Raises CaptureError, with torch's own reason, if torch.export cannot capture the model, and
    InputError if a loss is wanted and what comes out is no scalar.
    """
    wrapped = _Model(model, loss_fn, inputs, want_loss)
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    try:
        refuse_backward_hooks((_strip(name), module) for name, module in wrapped.named_modules())
        with (
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
            _without_saved_tensor_hooks(),
            refuse_autograd_functions(),
            _as_if_on(device, wrapped, inputs.tensors) as tensors,
        ):
            for text in (r".*assigned during export", r"The \.grad attribute of a Tensor that is not a leaf"):
                warnings.filterwarnings("ignore", message=text)  # of export's own doing, or looked into by us
            exported = torch.export.export(wrapped, tensors, strict=False)
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, TwobpError):
                raise cause from None
        if want_loss and loss_fn is not None and inputs.unflatten(inputs.tensors)[2] is None:
            raise InputError(
                "The loss could not be computed, and no target= was given: pass what loss_fn compares with. "
                f"({_first_lines(error, 1)})"
            ) from error
        if isinstance(error, TypeError):
            raise CaptureError(
                f"{type(model).__name__} or its loss_fn raised while it was captured: {_first_lines(error)}\n"
                "Call them the same way outside of the pipe to see where."
            ) from error
        raise CaptureError(
            f"torch.export could not capture {type(model).__name__} into one graph: {_first_lines(error)}\n"
            "Remove control flow that depends on tensor values (or use torch.cond), or leave that part outside of the model."
        ) from error
    finally:
        for state, values in kept:  # export replaces containers by copies, and what the traced forward made is fake
            for name in [name for name in state if name not in values]:
                del state[name]
            state.update(values)
    returned = wrapped.recorded.outputs
    if returned is None:
        raise CaptureError(f"torch.export never ran {type(model).__name__}.forward.")
    _mark_sources(exported, wrapped, model)
    module = exported.graph_module
    refuse_functorch_transforms(module.graph)
    for node in list(module.graph.nodes):
        if node.target in _ASSERTIONS:
            module.graph.erase_node(node)
        elif stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {key: (_strip(path), cls) for key, (path, cls) in stack.items() if path != ""}
    module.graph.eliminate_dead_code(has_effect)
    module.recompile()
    for changed in wrapped.recorded.changed.values():
        refuse_carried_state(changed, exported.constants)
    constants = {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)}
    names = tuple(node.name for node in outputs(module.graph))
    return Captured(module, returned, names, constants)


@contextlib.contextmanager
def _as_if_on(
    device: torch.device | None, module: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """For the time of a capture, let parameters, buffers and inputs pass for fake tensors on `device`.

    With None only those on the meta device do, on the CPU: they hold no data either way, but on the meta device torch would trace
    other kernels than the model will run, and on torch 2.13 some composite operators (nll_loss) have no gradient there.
    """
    registries: list[dict[str, Any]] = []
    for child in module.modules():
        registries += [child._parameters, child._buffers]
    held = [value for registry in registries for value in registry.values() if value is not None]
    if device is None and not any(tensor.is_meta for tensor in (*held, *inputs)):
        # Tensors of their own: export confuses one tensor given twice, and takes no result of another graph or of inference mode.
        yield tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            target = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return fakes[id(tensor)]

    kept = [(registry, dict(registry)) for registry in registries]
    try:
        for registry, values in kept:
            registry.update({name: fake(value) for name, value in values.items() if value is not None})
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]  # alive, so that no two share an id
        yield tuple(fake(tensor) for tensor in own)
    finally:
        for registry, values in kept:
            registry.update(values)


def _mark_sources(exported: torch.export.ExportedProgram, wrapped: nn.Module, model: nn.Module) -> None:
    kinds = {
        InputKind.PARAMETER: SourceKind.PARAMETER,
        InputKind.BUFFER: SourceKind.BUFFER,
        InputKind.CONSTANT_TENSOR: SourceKind.CONSTANT,
        InputKind.USER_INPUT: SourceKind.INPUT,
    }
    canonical = _canonical_names(wrapped)
    nodes = placeholders(exported.graph_module.graph)
    position = 0
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
        if spec.kind not in kinds:
            raise CaptureError(
                f"{type(model).__name__} uses {spec.target or node.name}, a {spec.kind.name}, which cannot be split into stages."
            )
        kind = kinds[spec.kind]
        if kind is SourceKind.INPUT:
            key, position = str(position), position + 1
        elif kind is SourceKind.CONSTANT:
            key = str(spec.target)
        else:
            key = _strip(canonical.get(str(spec.target), str(spec.target)))
        node.meta["source"] = Source(kind, key)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every FQN of a parameter or buffer -> the first FQN of the same object (tied weights have several)."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, value in named(remove_duplicate=False):
            names[name] = first.setdefault(id(value), name)
    return names


def _strip(path: str) -> str:
    """The user's own FQN: without the name under which the wrapper holds the model. A loss module's are apart from the model's."""
    if path == "loss_fn" or path.startswith("loss_fn."):
        return LOSS_PREFIX + path.removeprefix("loss_fn").removeprefix(".")
    return "" if path == "model" else path.removeprefix("model.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _first_lines(error: BaseException, count: int = 6) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: " + "\n    ".join(lines[:count])


class _Stage(nn.Module):
    """A stage's graph as a module: its parameters and buffers are fake, its forward runs the graph node by node, so that the
    traced nodes keep module FQN and source line. Outputs that share storage with an input or another output are copied: AOTAutograd
    gives such outputs no gradient of their own.
    """

    def __init__(self, module: fx.GraphModule, trainable: Mapping[str, bool]) -> None:
        super().__init__()
        self._interpret = fx.Interpreter(module).run
        self._order: list[str | None] = []
        self._copied: set[int] = set()
        self.sources: dict[str, Source] = {}
        for node in placeholders(module.graph):
            source, value = node.meta["source"], node.meta["val"]
            if source.kind is SourceKind.PARAMETER:
                self.register_parameter(node.name, nn.Parameter(value, requires_grad=trainable[source.key]))
            elif source.kind in (SourceKind.BUFFER, SourceKind.CONSTANT):
                self.register_buffer(node.name, value)
            else:
                self._order.append(None)
                continue
            self._order.append(node.name)
            self.sources[node.name] = source

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(inputs)
        args = [next(given) if name is None else getattr(self, name) for name in self._order]
        results = self._interpret(*args, enable_io_processing=False)
        return tuple(value.clone() if i in self._copied else value for i, value in enumerate(results))

    def find_aliases(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run once on fake tensors to learn which outputs to copy; returns the outputs."""
        held = {storage_key(t) for t in (*inputs, *self.parameters(), *self.buffers())}
        results: tuple[torch.Tensor, ...] = self(*inputs)
        for i, value in enumerate(results):
            key = storage_key(value)
            if key in held:
                self._copied.add(i)
            held.add(key)
        return results


@dataclass(frozen=True, slots=True)
class CapturedStage:
    """A stage's joint graph. `sources`: by name of the joint's parameters and buffers; `inputs`: what its plain inputs are, by
    position; `sent`: the fake tensors it computes, by name, marked with whether they require a gradient.
    """

    joint: fx.GraphModule
    sources: Mapping[str, Source]
    inputs: tuple[Source, ...]
    sent: Mapping[str, torch.Tensor]


def capture_stage(
    stage: StageGraph,
    received: Mapping[str, torch.Tensor],
    *,
    trainable: Mapping[str, bool],
    differentiable_inputs: frozenset[str],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> CapturedStage:
    """Trace the joint forward-backward graph of one stage, on fake tensors.

    received: the fake tensors the stage before sends, with requires_grad set. trainable: FQN -> requires_grad.
    Raises CaptureError naming the stage if tracing fails.
    """
    entry = [n for n in placeholders(stage.module.graph) if n.meta["source"].kind in (SourceKind.INPUT, SourceKind.RECEIVED)]
    sources = tuple(node.meta["source"] for node in entry)
    module = _Stage(stage.module, trainable)
    inputs = []
    for node, source in zip(entry, sources, strict=True):
        if source.kind is SourceKind.RECEIVED:
            inputs.append(received[source.key])
        else:
            inputs.append(node.meta["val"].detach().requires_grad_(source.key in differentiable_inputs))
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
            # torch's own word that an operator has no derivative and its gradient would be dropped: an error here.
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered", category=UserWarning)
            # As the user calls backward() outside of autocast, or no cast is made twice: eager's own way.
            stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
            stack.enter_context(_without_saved_tensor_hooks())
            # oneDNN's fused recurrent layers keep their workspace only where autograd runs: take the layers apart instead.
            stack.enter_context(_without_onednn())
            with _fake_mode(stage.module):
                sent = module.find_aliases(inputs)
            stack.enter_context(torch.fx.traceback.preserve_node_meta())
            joint = aot_export_joint_with_descriptors(
                stack, module, tuple(inputs), decompositions=dict(decompositions)
            ).graph_module
    except Exception as error:
        raise CaptureError(f"Stage {stage.index} could not be traced: {_first_lines(error)}") from error
    return CapturedStage(joint, module.sources, sources, dict(zip(stage.computes, sent, strict=True)))


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    # Not torch.backends.mkldnn.flags: leaving it warns on machines without an Intel GPU.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _without_saved_tensor_hooks() -> Any:
    """Keep hooks of the caller's (a checkpointed region's, say) from what tracing saves. None are set where there are none:
    torch.func refuses any.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _fake_mode(module: fx.GraphModule) -> Any:
    for node in module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return contextlib.nullcontext()
