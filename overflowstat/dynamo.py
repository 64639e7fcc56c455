"""What torch.compile is told of this package, and asked: which hooks it traces, and what it leaves alone."""

import sys
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

__all__ = [
    "as_known",
    "compiled_now",
    "compiled_versions",
    "constant_where_traced",
    "forget_wrapped_functions",
    "frames_compiled",
    "get_eval_frame_callback",
    "has_compiled",
    "in_place_by_inductor",
    "is_loaded",
    "is_making_a_program",
    "is_only_asked",
    "may_be_quantized",
    "not_compiled",
    "traced_only",
    "unwritable_body",
    "value_in_graph",
]

_EVAL_FRAME = torch._C._dynamo.eval_frame

get_eval_frame_callback = _EVAL_FRAME.get_eval_frame_callback
"""Gives something to be called where what the calling code calls is compiled."""

_Function = TypeVar("_Function", bound=Any)


def not_compiled(function: _Function) -> _Function:
    """Have neither a function nor what it calls compiled; compiled code calls it as it is.

    As torch.compiler.disable, which imports a compiler and takes a wrapper more.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "overflowstat watches this model, until monitor.disable() or monitor.remove()"
    _frame_strategy(function, _EVAL_FRAME._FrameAction.SKIP)
    return function


def traced_only(function: _Function) -> _Function:
    """Have a function compiled as a part of others, and not where it is called from what runs as it is."""
    _frame_strategy(function, _EVAL_FRAME._FrameAction.DEFAULT)
    return function


def constant_where_traced(function: _Function) -> _Function:
    """Have a function called where a graph is made, and what it gives then built in.

    As torch.compiler.assume_constant_result, which imports a compiler.
    """
    function._dynamo_marked_constant = True
    return function


def _frame_strategy(function: Any, called: Any) -> None:
    """Skip the frames of a function, and do that with those that it calls."""
    strategy = _EVAL_FRAME._FrameExecStrategy(_EVAL_FRAME._FrameAction.SKIP, called)
    _EVAL_FRAME.set_code_exec_strategy(function.__code__, strategy)


def compiled_now() -> object:
    """Stands for the graph that Dynamo makes at the moment; None outside of it."""
    guards: Any = sys.modules.get("torch._guards")
    return None if guards is None else guards.CompileContext.current_compile_id()


def is_making_a_program() -> bool:
    """Whether what is called computes nothing, and is written down for a program that will, by torch.export, make_fx or
    AOTAutograd. All that is done then is written down with it."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_exporting() or torch._C._get_dispatch_mode(proxy) is not None


# Their bodies become a part of the graph around them. All others take theirs for functions that write nothing.
_MAY_WRITE = {
    "autograd.Function",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
}
_AS_USERS_KNOW_IT = {
    "cond": "torch.cond",
    "invoke_subgraph": "torch.compiler.nested_compile_region",
    "map_impl": "map",
    "None": "a hook of a tensor",
}


def unwritable_body() -> str | None:
    """Where Dynamo traces the body of an operation, as a branch of torch.cond, which must not write to tensors that
    were there before: the name of the operation. None elsewhere.

    To be called in what is `constant_where_traced`.
    """
    translator: Any = sys.modules["torch._dynamo.symbolic_convert"]
    tracer = translator.InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None:
        name = getattr(tracer.source_target, "__name__", str(tracer.source_target))
        if name not in _MAY_WRITE:
            return _AS_USERS_KNOW_IT.get(name, name)
        tracer = tracer.parent
    return None


def may_be_quantized(tensor: torch.Tensor) -> bool:
    """Whether AOTAutograd makes a graph in which a tensor may be a quantized one when that runs. What
    torch.quantize_per_tensor gives is float32 to a compiler, and so is what is made of it."""
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or tensor.dtype != torch.float32:
        return False
    aten = torch.ops.aten
    quantize = aten.quantize_per_tensor
    operations = quantize.default, quantize.tensor_qparams, quantize.tensors, aten.quantize_per_tensor_dynamic.default
    return any(mode.tracer.graph.find_nodes(op="call_function", target=operation) for operation in operations)


def in_place_by_inductor(operation: OpOverload, in_place: OpOverload, written: int) -> None:
    """Have Inductor, where it is loaded, call another operation, that gives nothing and writes to an argument, in place
    of one whose result is copied to that argument, an input of the graph, and used nowhere else.

    It could have one that writes from the beginning, but spends 12 ms on each call of such a one, in a pass of its own
    (decompose_auto_functionalized).

    Args:
        written: the place of the argument, in both.
    """
    passes: Any = sys.modules.get("torch._inductor.fx_passes.reinplace")
    if passes is None or operation in getattr(passes, "inplaceable_ops", {operation}):
        return

    def is_only_copied(node: Any) -> bool:
        copied = all(user.target is torch.ops.aten.copy_.default for user in node.users)
        return copied and node.args[written].op == "placeholder"

    passes.inplaceable_ops[operation] = passes.InplaceableOp(in_place, written, is_only_copied)


def as_known(size: int | torch.SymInt) -> int | torch.SymInt:
    """A number where that is the only one which a graph takes: Dynamo has a symbol for it also then."""
    known: int | None = size if isinstance(size, int) else size.node.maybe_as_int()
    return size if known is None else known


def is_only_asked(tensor: torch.Tensor) -> bool:
    """Whether Dynamo calls an operation with a tensor for no more than what this gives, and the compiler behind it will
    call it once more, to see what it does. Half a second of bert-base's operations."""
    fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def value_in_graph(tensor: torch.Tensor) -> object | None:
    """What stands for the numbers of a tensor where AOTAutograd makes a graph, as long as they are the same: a write to
    the tensor, or to one that shares memory with it, makes it another object. None elsewhere."""
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    if functional is None or not isinstance(tensor, functional.FunctionalTensor):
        return None
    functions: Any = torch
    functions._sync(tensor)
    value: object = functions._from_functional_tensor(tensor.elem)
    return value


def has_compiled() -> bool:
    return frames_compiled() > 0


def frames_compiled() -> int:
    """In this process, by now."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["frames"]["total"]


def is_loaded() -> bool:
    """Whether anything can have been compiled in this process."""
    return "torch._dynamo.eval_frame" in sys.modules


def compiled_versions(code: CodeType) -> int:
    """How many there are that start with this code."""
    if not is_loaded():
        return 0
    return len(_EVAL_FRAME._debug_get_cache_entry_list(code))


def forget_wrapped_functions() -> None:
    """Have modules and functions of torch's own that torch.compile was given compiled anew. They share the code of a
    wrapper, so that what was made of one without hooks may run in place of another."""
    if is_loaded():
        code = sys.modules["torch._dynamo.external_utils"].wrap_inline(forget_wrapped_functions).__code__
        if compiled_versions(code):
            _EVAL_FRAME.reset_code(code)
