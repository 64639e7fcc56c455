"""Runs a script in this process as `python train.py`, or `python -m package.module`, would in one of its own.

Not by runpy: that puts `__main__` back when the script's last line has run, while threads and exit handlers of the
script may still pickle or start processes by it, and leaves its own frames in every traceback. Not in another process:
that would have to be told what to watch by something that any Python process executes.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn

__all__ = ["ScriptError", "run_script"]

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class ScriptError(Exception):
    """There is no such script, or none that can be read."""


def run_script(
    name: str, arguments: Sequence[str], is_module: bool, at_end: Callable[[BaseException | None], None]
) -> NoReturn:
    """Make it `__main__`, run it, and end this process as Python does: with its exit status and its traceback.

    Args:
        name: of a file, a folder or an archive that has a `__main__`, or "-" for stdin; or of a module.
        arguments: what it finds in `sys.argv`.
        is_module: which of these.
        at_end: called when the script has ended, with what it raised, if that is an error. It may raise itself, which
            then is what the script has ended with. Where the script has left threads that Python waits for, it is
            called when these have ended, too.

    Raises:
        ScriptError: it is not there. Nothing has been run then, but of a module the packages that it is in.
        SystemExit: in all other cases, with the status.
    """
    ended_with: BaseException | None = None
    try:
        exec(_become(name, arguments, is_module), sys.modules["__main__"].__dict__)
    except ScriptError:
        raise
    except BaseException as error:
        ended_with = error
    failure = None if isinstance(ended_with, SystemExit) else ended_with
    if _is_alone():
        try:
            at_end(failure)
        except BaseException as late:
            if ended_with is None or (isinstance(ended_with, SystemExit) and not ended_with.code):
                ended_with = late  # or else it has failed already, and how it did is kept
    else:
        atexit.register(at_end, failure)
    if ended_with is None or isinstance(ended_with, SystemExit):
        raise SystemExit(0 if ended_with is None else ended_with.code)
    _show(ended_with)
    if isinstance(ended_with, KeyboardInterrupt):
        _die_of_interrupt()
    raise SystemExit(1)


def _is_alone() -> bool:
    return all(thread.daemon or thread is threading.current_thread() for thread in threading.enumerate())


def _become(name: str, arguments: Sequence[str], is_module: bool) -> CodeType:
    """Set up all that a script finds when it begins, and give its code. Raises SyntaxError for what is none."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None, __file__=None)
    if is_module:
        _set_first_path(os.getcwd())
        sys.argv[:] = ["-m", *arguments]  # as packages find it that are imported on the way to the module
        sys.modules["__main__"] = main
        code = _set_up_module(main, runpy._get_module_details, name)  # type: ignore[attr-defined]
        sys.argv[0] = main.__file__ or name
        return code
    sys.argv[:] = [name, *arguments]
    if name == "-":
        source = sys.stdin.buffer.read()
        _set_first_path("")
        main.__file__, main.__loader__ = "<stdin>", BuiltinImporter
        sys.modules["__main__"] = main
        return compile(source, "<stdin>", "exec", dont_inherit=True)
    path = os.path.join(os.getcwd(), name)
    if os.path.isdir(path) or _is_archive(path):
        _set_first_path(path)
        sys.modules["__main__"] = main
        return _set_up_module(main, runpy._get_main_module_details)  # type: ignore[attr-defined]
    try:
        with io.open_code(path) as file:
            source = file.read()  # once, for it may be a pipe
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ScriptError(f"{name!r} cannot be read: {reason}") from error
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    return pkgutil.read_code(io.BytesIO(source)) or compile(source, path, "exec", dont_inherit=True)


def _set_up_module(main: ModuleType, find: Callable[..., tuple[str, Any, CodeType]], *name: str) -> CodeType:
    """As `python -m` does, by what that finds its module with."""
    _, spec, code = find(*name, error=ScriptError)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__file__, main.__dict__["__cached__"] = spec.origin, spec.cached
    return code


def _is_archive(path: str) -> bool:
    """Whether modules can be imported from a file."""
    return os.path.isfile(path) and pkgutil.get_importer(path) is not None


def _set_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def _show(error: BaseException) -> None:
    """As Python does with what nobody has caught, without the frames that the script was run from."""
    shown = error.__traceback__
    while shown is not None and _is_ours(shown.tb_frame):
        shown = shown.tb_next
    error.__traceback__ = shown
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown  # which some exit handlers look at
    sys.last_exc = error  # type: ignore[attr-defined, unused-ignore]
    try:
        sys.excepthook(type(error), error, shown)
    except Exception as failure:
        print("Error in sys.excepthook:", file=sys.stderr)
        failure.__traceback__ = failure.__traceback__ and failure.__traceback__.tb_next
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, shown)


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((PACKAGE, "<frozen runpy>", "<frozen importlib")) or file == runpy.__file__


def _die_of_interrupt() -> NoReturn:
    """What Python does after its exit handlers: whoever has started this process shall see that it was Ctrl-C."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(128 + signal.SIGINT)  # where it is blocked
