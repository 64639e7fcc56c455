"""The module calls that the calling thread is in, and the lines of the user's code there, as told by its stack."""

import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["Call", "Source", "StageCall", "calls_in_progress", "stage_call", "user_source"]

# What is not the user's own. A trailing separator, since there are packages whose names begin with these.
_NOT_THE_USERS = (*(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__)), "<frozen ")
_LEARN_SHAPES = ("_forward_metadata_inference", "_shape_inference")  # of PipelineStage
_DEMO = os.path.join(os.path.dirname(__file__), "demo.py")  # which shows what users would see of theirs


class Source(NamedTuple):
    """A line of Python."""

    place: str
    """As "model.py:17"."""
    code: str
    """The line itself, or nothing where its file is not to be had."""


class Call(NamedTuple):
    """A module call that has not returned."""

    module: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    """These as forward was given them, after the hooks that come before it."""
    result: object
    """What forward gave; None before it has."""
    source: Source | None
    """What the user's code is at in it; None for a module whose forward is torch's own."""


def calls_in_progress() -> Iterator[Call]:
    """The innermost first."""
    inside: FrameType | None = None  # the frame of the user's code that was met last
    for frame in _stack():
        if frame.f_code is nn.Module._call_impl.__code__:
            found, at = frame.f_locals, inside and _source(inside)
            yield Call(found["self"], tuple(found["args"]), dict(found["kwargs"]), found.get("result"), at)
            inside = None
        elif inside is None and _is_the_users(frame):
            inside = frame


class StageCall(Enum):
    """Who calls a model that is a stage of a pipeline of torch.distributed."""

    NONE = 0
    """It is none."""
    STAGE = 1
    SHAPES = 2
    """To learn shapes, on memory that nobody has written to."""


def stage_call() -> StageCall:
    """Of the innermost call, on the stack. Costs a microsecond."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return StageCall.NONE
    names = [frame.f_code.co_name for frame in islice(_stack(), 12) if "pipelining" in frame.f_code.co_filename]
    if not names:
        return StageCall.NONE
    return StageCall.SHAPES if any(name in _LEARN_SHAPES for name in names) else StageCall.STAGE


def user_source() -> Source | None:
    """The innermost line of the user's code; None where all of it is torch's.

    What wraps the forward of a module of torch's own, as accelerate and others do, tells nothing: then that is the line
    that calls the module.
    """
    wrapped: nn.Module | None = None
    found: FrameType | None = None
    for frame in _stack():
        if wrapped is not None and frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is wrapped:
            wrapped = found = None
        elif _is_the_users(frame):
            if wrapped is None:
                return _source(frame)
            found = found or frame
        elif wrapped is None and frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and getattr(type(module).forward, "__code__", None) is frame.f_code:
                wrapped = module
    return found and _source(found)


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_the_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file == _DEMO or not file.startswith(_NOT_THE_USERS)


def _source(frame: FrameType) -> Source:
    file = frame.f_code.co_filename
    code = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
    return Source(f"{os.path.basename(file)}:{frame.f_lineno}", code)
