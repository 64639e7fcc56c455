"""A script that `overflowstat run` runs finds what it finds under Python, and ends as it ends there.

What is expected is what Python itself does with the same file.
"""

from __future__ import annotations

import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from running import Server, python, write

NOTHING_CALLED = [
    "overflowstat: no module was called in this process, and nothing watched (processes that it starts are not)"
]

ENDINGS = {
    "returns": "print('done')",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with nothing": "import sys; sys.exit()",
    "exits with words": "import sys; sys.exit('words')",
    "exits in an exit": """
        import sys
        try:
            sys.exit(4)
        finally:
            print("finally")
    """,
    "raises": """
        def inner():
            raise ValueError("a\\nb")
        def outer():
            try:
                inner()
            except ValueError as error:
                raise RuntimeError("outer") from error
        outer()
    """,
    "raises while it handles": """
        try:
            1 / 0
        except ZeroDivisionError:
            {}["key"]
    """,
    "raises what is no Exception": "raise GeneratorExit('mine')",
    "raises a group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "is interrupted": """
        import atexit
        atexit.register(print, "at exit")
        raise KeyboardInterrupt
    """,
    "catches its interrupt": """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**9): pass
        except KeyboardInterrupt:
            raise SystemExit(7)
    """,
    "is gone": "import os; print('lost'); os._exit(5)",
    "is gone with all it has written": "import os; print('kept', flush=True); os._exit(0)",
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is no Python": "def f(:\n    pass\n",
    "is not indented": "if True:\nprint(1)\n",
    "has a hook of its own": """
        import atexit, sys
        def hook(kind, error, at):
            names = []
            while at is not None:
                names.append(at.tb_frame.f_code.co_name)
                at = at.tb_next
            print(kind.__name__, error, names)
        sys.excepthook = hook
        atexit.register(lambda: print("last", sys.last_type.__name__, sys.last_traceback.tb_lineno))
        1 / 0
    """,
    "has a hook that exits": """
        import sys
        def hook(*_):
            raise SystemExit(9)
        sys.excepthook = hook
        1 / 0
    """,
    "has a hook that fails": """
        import sys
        def hook(*_):
            {}["key"]
        sys.excepthook = hook
        1 / 0
    """,
    "has a thread that stays": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("main")
    """,
    "has a pool that nobody shuts down": """
        from concurrent.futures import ThreadPoolExecutor
        print(ThreadPoolExecutor(1).submit(lambda: 5).result())
    """,
    "prints what cannot be printed": "print('\\ud800')",
    "writes at the end": """
        class Late:
            def __del__(self):
                print("deleted")
        late = Late()
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_does_under_python(server: Server, tmp_path: Path, ending: str) -> None:
    if ending == "raises a group" and sys.version_info < (3, 11):
        pytest.skip("Python has no ExceptionGroup")
    write(tmp_path, "train.py", ENDINGS[ending])
    expected = python(tmp_path, "train.py")
    ended = server.run(tmp_path, "train.py")
    assert (ended.status, ended.output, ended.others) == (expected.status, expected.output, expected.errors)
    is_told = ending not in ("is gone", "is gone with all it has written", "is terminated")
    assert ended.told == NOTHING_CALLED * is_told


def test_a_script_in_another_encoding(server: Server, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n".encode("latin-1"))
    assert server.run(tmp_path, "train.py").output == "'\\xe9'\n"


FINDS = """
    "its words"
    import json, os, pickle, sys
    from multiprocessing import get_context

    class Kept:
        pass

    def double(x):
        return 2 * x

    def found():
        import __main__
        names = sorted(name for name in vars(__main__) if name.startswith("__"))
        names.remove("__builtins__")
        return {
            "argv": sys.argv, "path": sys.path[0], "names": names, "doc": __doc__, "file": __file__,
            "package": __package__, "spec": __spec__ and [__spec__.name, __spec__.origin], "cached": __cached__,
            "loader": type(__loader__).__name__, "main": sys.modules["__main__"] is __main__ and __name__,
            "builtins": type(__builtins__).__name__, "annotations": str(__annotations__),
            "pickled": type(pickle.loads(pickle.dumps(Kept()))) is Kept, "errors": sys.stdout.errors,
            "neighbour": __import__("neighbour").here,
        }

    if __name__ == "__main__":
        x: int = 3
        print(json.dumps(found()))
        if "--spawn" in sys.argv:
            for method in ("spawn", "fork", "forkserver"):
                with get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [1, 2]))
    else:
        print("imported as", __name__, [name for name in sys.modules if name == "torch"])
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A script, a link to it, a package, a folder and an archive that do the same."""
    for name in ("train.py", "sub/train.py", "package/train.py", "package/whole/__main__.py", "folder/__main__.py"):
        write(tmp_path, name, FINDS)
        write(tmp_path, f"{Path(name).parent}/neighbour.py", "here = 1")
    for package in ("package", "package/whole"):
        write(tmp_path, f"{package}/__init__.py", "import sys; print('package', sys.argv)")
    (tmp_path / "link.py").symlink_to("sub/train.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "train.py", "__main__.py")
        archive.write(tmp_path / "neighbour.py", "neighbour.py")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--lr", "1e-3", "-m", "--", "--help"],
        ["train.py", "--", "--lr"],
        ["./sub/../train.py"],
        ["link.py", "a b"],
        ["-m", "package.train", "--on-detect", "warn"],
        ["-m", "package.whole"],
        ["./folder", "x"],
        ["archive.zip"],
    ],
    ids=" ".join,
)
def test_a_script_finds_what_it_finds_under_python(server: Server, scripts: Path, command: list[str]) -> None:
    expected = python(scripts, *command)
    assert expected.status == 0
    ended = server.run(scripts, *command)
    assert (ended.status, ended.output, ended.others) == (0, expected.output, expected.errors)


PIPED = """
    import pickle, sys
    class Kept:
        pass
    names = sorted(name for name in globals() if name.startswith("__"))
    print(names, __file__, type(__loader__), __spec__, __package__, __name__, sys.modules["__main__"])
    print(sys.argv, repr(sys.path[0]), type(pickle.loads(pickle.dumps(Kept()))) is Kept, repr(sys.stdin.read()))
    if sys.argv[0] != "fifo":  # which whoever shows a traceback would open once more, and wait for
        import neighbour
        1 / 0
"""


@pytest.mark.parametrize("way", ["-", "fifo"])
def test_a_script_may_come_by_a_pipe(server: Server, tmp_path: Path, way: str) -> None:
    """It can be read once only."""
    script = write(tmp_path, "train.py", PIPED)
    write(tmp_path, "neighbour.py", "print('neighbour')")
    os.mkfifo(tmp_path / "fifo")

    def feed() -> None:
        (tmp_path / "fifo").write_bytes(script.read_bytes())

    ended = []
    for run in (python, server.run):
        thread = threading.Thread(target=feed)
        thread.start()
        arguments, stdin = ([way], os.devnull) if way == "fifo" else ([way, "--lr", "3"], tmp_path / "fifo")
        ended.append(run(tmp_path, *arguments, stdin=stdin))
        thread.join()
    expected, found = ended
    assert "['-', '--lr', '3'] '' True ''" in expected.output or way != "-"
    assert expected.status == (way != "fifo")
    assert (found.status, found.output, found.others) == (expected.status, expected.output, expected.errors)


def test_processes_that_a_script_starts_are_as_without(scripts: Path) -> None:
    """Above all, its main module is imported again in them, and nothing of ours is."""
    command = ["train.py", "--spawn"]
    expected = python(scripts, *command)
    ended = python(scripts, "-m", "overflowstat", "run", *command)
    assert "spawn [2, 4]" in expected.output and "fork [2, 4]" in expected.output
    assert (ended.status, ended.output, ended.others) == (0, expected.output, expected.errors)
    assert ended.output.count("imported as __mp_main__ []") == 2  # by spawn and forkserver; torch in none of them


@pytest.mark.slow
def test_where_python_is_told_not_to_touch_the_path_it_is_left_alone(scripts: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python knows no safe path")
    write(scripts, "train.py", "import sys; print(sys.path)")
    environment = {"PYTHONSAFEPATH": "1"}
    expected = python(scripts, "train.py", environment=environment)
    ended = python(scripts, "-m", "overflowstat", "run", "train.py", environment=environment)
    assert ended.output == expected.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["missing.py"], "'missing.py' cannot be read: No such file or directory"),
        (["empty"], "can't find '__main__' module in '"),
        (["nul\0l.py"], "'nul\\x00l.py' cannot be read: embedded null byte"),
        (["-m", "nowhere.to.be"], "'nowhere.to.be'"),
        (["-m", "package"], "No module named package.__main__; 'package' is a package and cannot be directly executed"),
        (["-m", "json.nothing"], "No module named json.nothing"),
        ([], "no script is given; see overflowstat run --help"),
    ],
)
def test_a_script_that_is_not_there_is_one_line(server: Server, tmp_path: Path, command: list[str], words: str) -> None:
    write(tmp_path, "train.py", "print('ran')")
    write(tmp_path, "package/__init__.py", "")
    (tmp_path / "empty").mkdir()
    ended = server.run(tmp_path, *command)
    assert (ended.status, ended.output) == (2, "")
    assert words in ended.errors and ended.errors.count("\n") == 1 and ended.errors.startswith("overflowstat")


def test_a_package_that_fails_on_the_way_to_a_module_fails_as_a_script(server: Server, tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "import nothing_of_this_name")
    write(tmp_path, "package/train.py", "")
    ended = server.run(tmp_path, "-m", "package.train")
    assert ended.status == 1
    assert ended.others.splitlines()[1] == f'  File "{tmp_path}/package/__init__.py", line 1, in <module>'
    assert ended.others.splitlines()[-1] == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
