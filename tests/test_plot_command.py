"""python -m overflowstat plot: files, arguments, and what is said of those that are not as they should be."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written_traces import HEADER, frame, layers, numbers, write_trace

from overflowstat import TraceError, cli, load_trace
from overflowstat.plotting.chart import make_chart
from overflowstat.plotting.page import page
from overflowstat.plotting.png import png
from overflowstat.terminal import Progress
from overflowstat.whole_file import write_whole


@pytest.fixture
def plot(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Gives the exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = cli.main(["plot", *map(str, arguments)])
        except SystemExit as left:
            status = int(str(left.code))
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return layers(tmp_path / "run.jsonl", 5)


def png_size(data: bytes) -> tuple[int, int]:
    """Of a whole one: every chunk has the checksum that it says."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, kinds = 8, []
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(data[at + 8 + length : at + 12 + length], "big")
        kinds.append(kind)
        at += 12 + length
    assert kinds[-1] == b"IEND"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_page_is_written_beside_the_trace(plot: Any, trace: Path) -> None:
    status, out, err = plot(trace)
    assert (status, err) == (0, "")
    assert out == f"{trace.with_suffix('.html')}: 1 batch of 5 module calls\n"
    assert trace.with_suffix(".html").read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in trace.parent.iterdir()) == ["run.html", "run.jsonl"]


def test_a_picture_is_written_beside_the_trace(plot: Any, trace: Path) -> None:
    assert plot(trace, "--png")[0] == 0
    width, _ = png_size(trace.with_suffix(".png").read_bytes())
    assert width == 1440


def test_a_compressed_trace_loses_both_suffixes(plot: Any, trace: Path) -> None:
    packed = trace.with_name("other.jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert plot(packed)[0] == 0
    assert packed.with_name("other.html").exists()


def test_another_name(plot: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plot(trace, "-o", "page.html")[:2] == (0, "page.html: 1 batch of 5 module calls\n")
    assert (tmp_path / "page.html").exists()


def test_the_file_may_be_read_by_those_who_may_read_others(plot: Any, trace: Path) -> None:
    before = os.umask(0o022)
    try:
        plot(trace)
    finally:
        os.umask(before)
    assert stat.S_IMODE(trace.with_suffix(".html").stat().st_mode) == 0o644


def test_what_exists_is_overwritten_only_with_force(plot: Any, trace: Path) -> None:
    page = trace.with_suffix(".html")
    page.write_text("mine")
    status, out, err = plot(trace)
    assert (status, out) == (2, "")
    assert err == f"overflowstat plot: {str(page)!r} exists already: --force overwrites it, -o names another\n"
    assert page.read_text() == "mine"
    assert plot(trace, "--force")[0] == 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["run.jsonl", "link", "./run.jsonl"])
def test_the_trace_itself_is_never_overwritten(plot: Any, trace: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(trace)
    before = trace.read_bytes()
    status, _, err = plot(trace, "-o", f"{tmp_path}/{name}", "--force")
    assert status == 2
    assert "is the trace itself" in err
    assert trace.read_bytes() == before


def test_a_link_stays_and_its_file_is_written(plot: Any, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    (tmp_path / "target.html").write_text("old")
    assert plot(trace, "-o", tmp_path / "link.html", "--force")[0] == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "target.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("", "is a folder"),
        ("no/such/page.html", "there is no folder"),
        ("/dev/null", "exists already"),
        ("pipe", "exists already"),
        ("nul\0l", "cannot be written|null"),
    ],
)
def test_where_nothing_can_be_written(plot: Any, trace: Path, tmp_path: Path, output: str, problem: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    status, out, err = plot(trace, "-o", os.path.join(tmp_path, output))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert any(part in err for part in problem.split("|"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "run.jsonl"]


@pytest.mark.parametrize("name", ["pipe", "/dev/null"])
def test_what_is_no_file_is_not_overwritten(plot: Any, trace: Path, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    status, _, err = plot(trace, "-o", tmp_path / name, "--force")
    assert status == 2
    assert "is no ordinary file" in err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_not_written_wholly_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, is_there: bool
) -> None:
    page = tmp_path / "page.html"
    if is_there:
        page.write_text("mine")

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TraceError if isinstance(error, OSError) else type(error)) as raised:
        write_whole(str(page), b"new", overwrites=True)
    if isinstance(error, OSError):
        assert str(raised.value).endswith("page.html' cannot be written: No space left on device")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"] * is_there


def test_a_file_that_comes_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr(os, "fsync", lambda descriptor: page.write_text("theirs"))
    with pytest.raises(TraceError, match="exists already"):
        write_whole(str(page), b"ours")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(plot: Any, trace: Path) -> None:
    trace.parent.chmod(0o500)
    try:
        status, _, err = plot(trace)
    finally:
        trace.parent.chmod(0o700)
    assert status == 2
    assert err.endswith("cannot be written: Permission denied\n")


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "foreign": (b"a,b\n1,2\n", "is no trace of overflowstat"),
    "newer": (str({**HEADER, "version": 99}).replace("'", '"').encode() + b"\n", "is a trace of version 99"),
    "no frames": (str(HEADER).replace("'", '"').encode() + b"\n", "has no frames"),
    "damaged": (str(HEADER).replace("'", '"').encode() + b'\n{"type":"frame"}\n', "is damaged in line 2"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_trace(plot: Any, tmp_path: Path, kind: str) -> None:
    content, problem = FOREIGN[kind]
    (tmp_path / "run.jsonl").write_bytes(content)
    status, out, err = plot(tmp_path / "run.jsonl")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert problem in err
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def test_no_such_trace(plot: Any, tmp_path: Path) -> None:
    status, _, err = plot(tmp_path / "none.jsonl")
    assert (status, err.count("\n")) == (2, 1)
    assert "No such file" in err


def test_a_trace_that_is_cut_is_drawn_as_far_as_it_goes(plot: Any, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.jsonl", frame(0, "a", numbers("output", 1.0, 2.0)), ends=False)
    path.write_bytes(path.read_bytes() + b'{"type":"frame","ba')
    status, out, err = plot(path)
    assert status == 0
    assert "cut in its last line" in out
    assert err.count("\n") == 1
    assert "cut in its last line" in path.with_suffix(".html").read_text()


def test_batches(plot: Any, tmp_path: Path) -> None:
    path = layers(tmp_path / "run.jsonl", 3, batches=12)
    assert plot(path)[1].endswith("6 batches of 3 module calls; 6 of 12 batches are shown; --batches chooses others\n")
    assert plot(path, "--force", "--batches", "0,3-5,11")[1].endswith(": 5 batches of 3 module calls\n")
    text = path.with_suffix(".html").read_text()
    assert [int(part.split(",")[0]) for part in text.split('"number":')[1:]] == [0, 3, 4, 5, 11]
    status, _, err = plot(path, "--force", "--batches", "5,12")
    assert status == 2
    assert "has no frames of batch 12: it has 12 batches, from 0 to 11" in err


@pytest.mark.parametrize("batches", ["", "a", "1,", "-3", "5-3", "1-2-3", "0-64", "0-99999999999", "1.5"])
def test_batches_that_make_no_sense(plot: Any, trace: Path, batches: str) -> None:
    status, out, err = plot(trace, f"--batches={batches}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--batches" in err
    assert not trace.with_suffix(".html").exists()


def test_which_tensors(plot: Any, trace: Path) -> None:
    assert plot(trace, "--of", "input")[0] == 0
    assert '"shown":"input"' in trace.with_suffix(".html").read_text()
    for options in ([], ["--png"]):
        status, _, err = plot(trace, "--force", "--of", "weight", *options)
        assert status == 2
        assert (
            "there are no numbers of any weight in the batches that are to be shown: there are output and input" in err
        )


def test_a_suffix_that_says_otherwise(plot: Any, trace: Path) -> None:
    assert plot(trace, "-o", trace.with_suffix(".png"))[2].endswith("is to be a picture: give --png, too\n")
    assert plot(trace, "--png", "-o", trace.with_suffix(".HTML"))[0] == 2
    assert [path.name for path in trace.parent.iterdir()] == ["run.jsonl"]


def test_without_matplotlib_only_the_picture_is_missing(
    plot: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = plot(trace, "--png")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "pip install matplotlib" in err
    assert plot(trace)[0] == 0


def test_no_name_obeys_to_a_terminal(plot: Any, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a\x1b[31m.jsonl", frame(0, "b\x1b[0m", numbers("output", 1.0, 2.0)))
    for arguments in ([trace], [trace], [trace, "--batches", "7", "--force"]):
        _, out, err = plot(*arguments)
        assert "\x1b" not in out + err
        assert r"a\x1b[31m" in out + err


HOSTILE = ["a$b$", r"$\frac{", "</script>", "\x1b[31m", "日本語", "a" * 500, "\ud800", "%s {0} \\n", "$", "_^"]


@pytest.mark.parametrize("count", [1, 30])
def test_a_picture_of_hostile_names(plot: Any, tmp_path: Path, count: int) -> None:
    """As labels of the axis, few, and of groups, many; dollars would be mathematics, and fail."""
    bad = numbers("output", 1.0, "inf", "float16", posinf_count=1, finite_abs_max=2.0, first_bad=[0, 0])
    lines = [frame(0, f"{name}.{i}", bad) for name in HOSTILE for i in range(count)]
    trace = write_trace(tmp_path / "$x$.jsonl", *lines, root=r"$\nothing$")
    status, _, err = plot(trace, "--png")
    assert (status, err) == (0, "")
    width, height = png_size(trace.with_suffix(".png").read_bytes())
    assert width == 1440
    assert 400 < height < 2000


def test_a_picture_does_not_touch_the_settings_of_other_figures(plot: Any, trace: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 3.0}):
        plot(trace, "--png")
        assert matplotlib.rcParams["font.size"] == 3.0
    assert dict(matplotlib.rcParams) == before


def test_a_picture_of_everything_bad_and_of_all_zero(plot: Any, tmp_path: Path) -> None:
    nan = numbers("output", "nan", "nan", nan_count=8, finite_abs_max="nan", first_bad=[0, 0])
    for i, line in enumerate([nan, numbers("output", 0.0, 0.0), numbers("output", 0, 0, "int64")]):
        assert plot(write_trace(tmp_path / f"{i}.jsonl", frame(0, "", line, cls="Net")), "--png")[0] == 0
        png_size((tmp_path / f"{i}.png").read_bytes())


def test_a_picture_of_many_batches_of_thousands_of_calls(plot: Any, tmp_path: Path) -> None:
    path = layers(tmp_path / "run.jsonl", 2000, batches=6, bad_from=1500)
    assert plot(path, "--png")[0] == 0
    data = path.with_suffix(".png").read_bytes()
    assert png_size(data)[1] < 2000
    assert len(data) < 400_000


def test_colours_of_a_picture_are_where_the_numbers_are(plot: Any, tmp_path: Path) -> None:
    """One call from 1e-2 to 1e2 in float64, whose limits are far: the scale is that, and its middle 1."""
    from matplotlib import image

    path = write_trace(tmp_path / "run.jsonl", frame(0, "a", numbers("output", 0.01, 100.0, "float64")))
    plot(path, "--png")
    pixels = (image.imread(path.with_suffix(".png"))[:, :, :3] * 255).round().astype(int)
    span = (pixels == [0xA9, 0xCD, 0xEA]).all(axis=2)
    rows, columns = span.any(axis=1).nonzero()[0], span.any(axis=0).nonzero()[0]
    middle = span[:, pixels.shape[1] // 2]
    assert columns[-1] - columns[0] > 0.6 * pixels.shape[1]
    assert middle[(rows[0] + rows[-1]) // 2 + 6]
    peak = (pixels == [0x0B, 0x5F, 0xA5]).all(axis=2)
    assert peak.any(axis=1).nonzero()[0].max() < rows[0] + 4  # on top of the bar


def test_a_process_of_its_own(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overflowstat", "plot", str(trace), "--png"],
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "QtAgg", "DISPLAY": ""},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(trace.with_suffix(".png")))


def test_help_tells_what_is_drawn(plot: Any) -> None:
    status, out, _ = plot("--help")
    assert status == 0
    for word in ("--png", "--batches", "--force", "-o", "--of", "exit status", "examples"):
        assert word in out


@pytest.mark.skipif(shutil.which("script") is None, reason="script, which makes a terminal, is not on PATH")
def test_nothing_but_its_line_is_told_on_a_terminal(trace: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m overflowstat plot {trace}"
    done = subprocess.run(["script", "-qec", command, str(tmp_path / "log")], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert done.stdout.count(b"\n") == 1


@pytest.mark.parametrize("draw", [page, png])
def test_what_is_done_of_a_picture_is_told_batch_by_batch(draw: Any, tmp_path: Path) -> None:
    chart_shares: list[float] = []
    chart = make_chart(load_trace(layers(tmp_path / "run.jsonl", 3, 4)), None, chart_shares.append)
    assert chart_shares == [i / 16 for i in range(1, 17)]  # of four kinds of tensors
    shares: list[float] = []
    with_progress, without = draw(chart, None, shares.append), draw(chart)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert with_progress == without


@pytest.mark.parametrize("options", [[], ["--png"]])
def test_a_bar_is_shown_while_it_is_drawn(
    options: list[str], plot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "DELAY", 0.0)
    monkeypatch.setattr(Progress, "INTERVAL", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = plot(layers(tmp_path / "a\x1b.jsonl", 3, 2), *options)
    assert status == 0 and out.count("\n") == 1
    assert "\x1b" not in out + err
    shown = [text for text in err.split("\r") if text.startswith("drawing ")]
    assert [text.split()[-1] for text in shown][-3:] == ["50%", "75%", "100%"]
    assert err.endswith("\r") and err.split("\r")[-2].strip() == ""
