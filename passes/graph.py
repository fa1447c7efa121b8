"""What every pass needs to ask of a graph: its ends, the storage behind a value, where a node came from.

A *value* is what a node computes; its fake tensor is `node.meta["val"]`. Descriptors (`node.meta["desc"]`, from AOTAutograd)
say what a placeholder or an output means; nothing here looks at the spelling of a name.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

_CALL_INDEX = re.compile(r"@\d+")


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's inputs, in order."""
    return graph.find_nodes(op="placeholder")


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's one output node."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def outputs(graph: fx.Graph) -> list[Any]:
    """What the graph returns, flat: nodes, None or Python constants."""
    returned = output_node(graph).args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def output_descriptors(graph: fx.Graph) -> list[Any]:
    """The descriptor of every output, in the order of `outputs`."""
    return list(output_node(graph).meta["desc"])


def operations(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something: everything but inputs, attributes and the output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and everything they are computed from."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers, itself or in a graph it runs.

    Attention kernels are tagged by torch as random for their dropout: without any they draw none, and their backward is given the
    forward's seed.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return any(is_random(inner) for body in bodies(node) for inner in operations(body.graph))
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = {argument.name: value for argument, value in _schema_arguments(node, target)}
    return given.get("dropout_p") != 0 and "philox_seed" not in given


def has_effect(node: fx.Node) -> bool:
    """Whether dropping the node would change anything besides its value: it writes in place, or torch says it is impure."""
    return node.is_impure() or bool(written_arguments(node))


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator runs (a no_grad or autocast region, the branches of torch.cond)."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    owner = node.graph.owning_module
    found = [_attribute(owner, argument) for argument in node.all_input_nodes if argument.op == "get_attr"]
    return [body for body in found if isinstance(body, fx.GraphModule)]


def _attribute(module: fx.GraphModule | None, node: fx.Node) -> object:
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def _operands(node: fx.Node, body: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of a body's placeholder and the higher-order operator's argument for it."""
    given = [argument for argument in _flat_nodes(node.args) if argument.op != "get_attr"]
    taken = placeholders(body.graph)
    return list(zip(taken, given[-len(taken) :] if taken else [], strict=False))


def _flat_nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found


def _schema_arguments(node: fx.Node, target: torch._ops.OpOverload) -> Iterator[tuple[Any, Any]]:
    """Each argument of the operator's schema, with what the node gives for it."""
    for position, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        yield argument, node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments this node writes into: by the operator's schema, or by what the bodies of a higher-order operator write."""
    if isinstance(node.target, torch._ops.OpOverload):
        if not node.target._schema.is_mutable:
            return []
        return [
            each
            for argument, value in _schema_arguments(node, node.target)
            if argument.alias_info is not None and argument.alias_info.is_write
            for each in _flat_nodes(value)
        ]
    written: list[fx.Node] = []
    for body in bodies(node):
        owners = storage_owners(body.graph)
        inside = {owner for each in operations(body.graph) for value in written_arguments(each) for owner in owners[value]}
        written.extend(given for taken, given in _operands(node, body) if taken in inside)
    return written


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments whose storage the node's result may share, by the operator's schema; all of them if it has none."""
    if node.target is operator.getitem or isinstance(node.target, torch._ops.HigherOrderOperator):
        return [argument for argument in node.all_input_nodes if argument.op != "get_attr"]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    shared: set[str] = set()
    for returned in node.target._schema.returns:
        if returned.alias_info is not None:
            shared |= returned.alias_info.before_set | returned.alias_info.after_set
    return [
        each
        for argument, value in _schema_arguments(node, node.target)
        if argument.alias_info is not None and argument.alias_info.before_set & shared
        for each in _flat_nodes(value)
    ]


def storage_owners(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each value, the nodes whose storage it may share, by the operators' schemas: itself if it is nobody's view."""
    owners: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        shared = [owners[argument] for argument in aliased_arguments(node)]
        owners[node] = frozenset[fx.Node]().union(*shared) if shared else frozenset({node})
    return owners


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in a (possibly nested) value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def value_bytes(value: object) -> int:
    """Bytes of the tensors in a value, each counted at its own size."""
    return sum(_numel(tensor) * tensor.element_size() for tensor in tensors(value))


def _numel(tensor: torch.Tensor) -> int:
    numel = tensor.numel()
    return numel if type(numel) is int else int(_hint(numel))


def _hint(size: Any) -> int:
    """The size a symbolic dimension had when it was traced."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1


def storage_bytes(nodes: Iterable[fx.Node], *, besides: Iterable[fx.Node] = ()) -> int:
    """Bytes of the distinct storages behind the values of `nodes`, each counted once however many views of it there are.

    A storage counts whole: a view of ten elements keeps all of it alive. Storages behind `besides` (say, parameters, held
    anyway) do not count.
    """
    excluded = {storage_key(node.meta["val"]) for node in besides if isinstance(node.meta.get("val"), torch.Tensor)}
    held: dict[object, int] = {}
    for node in nodes:
        for tensor in tensors(node.meta.get("val")):
            key = storage_key(tensor)
            if key not in excluded:
                held[key] = max(held.get(key, 0), _storage_size(tensor))
    return sum(held.values())


def is_symbolic(value: object) -> bool:
    """Whether a value is a number that is not known yet, or a tensor with such a size or stride."""
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in numbers)


def _storage_size(tensor: torch.Tensor) -> int:
    size = tensor.untyped_storage().nbytes()
    return size if type(size) is int else int(_hint(size))


def storage_key(tensor: torch.Tensor) -> object:
    """A key that two tensors share exactly when they share storage."""
    key: object = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return key


def module_fqn(node: fx.Node) -> str:
    """The module (FQN) whose forward this node belongs to; '' for the root or when unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return _CALL_INDEX.sub("", str(list(stack.values())[-1][0]))


def module_path(node: fx.Node) -> list[str]:
    """The FQNs of all modules around the node, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [_CALL_INDEX.sub("", str(entry[0])) for entry in stack.values()]


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = tuple(os.path.join(folder, "") for folder in torch.__path__)
_OURSELVES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def source_line(node: fx.Node) -> str:
    """`file:line` of the innermost frame that created the node, outside of torch if there is one; '' if unknown.

    For a backward node it is its forward's.
    """
    frames = [frame for frame in _FRAME.findall(node.meta.get("stack_trace") or "") if not frame[0].startswith(_OURSELVES)]
    theirs = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return f"{theirs[-1][0]}:{theirs[-1][1]}" if theirs else ""


def writer(node: fx.Node) -> fx.Node:
    """The node that writes: for a higher-order operator, the first one in its bodies that does."""
    return next((writer(each) for body in bodies(node) for each in operations(body.graph) if written_arguments(each)), node)


def describe(node: fx.Node) -> str:
    """One line for an error message: node, operator, module FQN and source line."""
    fqn, line = module_fqn(node), source_line(node)
    return f"{node.name} ({node.target})" + (f" in module '{fqn}'" if fqn else "") + (f" at {line}" if line else "")


def build_graph(
    root: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Iterable[fx.Node],
    results: Sequence[fx.Node | None],
    *,
    results_meta: dict[str, Any] | None = None,
    on_placeholder: Callable[[fx.Node, fx.Node], None] | None = None,
) -> fx.GraphModule:
    """A new graph that takes `inputs`, runs `nodes` (in the order of the original graph) and returns `results`.

    Every value keeps its name and its meta; a value that was computed outside becomes a placeholder of the same name.
    `on_placeholder(new, old)` may fill in more meta. `root` keeps the attributes that get_attr nodes refer to.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copy = graph.placeholder(node.name)
        copy.name = node.name
        copy.meta = dict(node.meta)
        copies[node] = copy
        if on_placeholder is not None:
            on_placeholder(copy, node)
    wanted = set(nodes)
    for node in root.graph.nodes:
        if node in wanted and node not in copies:
            copies[node] = graph.node_copy(node, lambda argument: copies[argument])
            copies[node].name = node.name
    out = graph.output(tuple(None if node is None else copies[node] for node in results))
    out.meta = dict(results_meta or {})
    graph.lint()
    return fx.GraphModule(root, graph)
