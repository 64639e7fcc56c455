"""The host side of csrc/cuda under the sanitizers, and broken versions of it, each of which a test must catch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from device_on_cpu import CSRC, TESTS, compiler
from fake_cuda import FOLDER, Build, changed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_torch,
    pytest.mark.skipif(compiler() is None, reason="compiling the host side needs a C++ compiler"),
]

PLAIN = Build()
ADDRESS = Build(flags=("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"))
# With kernels of one thread a block: what those of the real ones do to each other is test_cuda_sanitizers.py's.
THREAD = Build(flags=("-O1", "-fsanitize=thread", "-Wno-tsan"), driver="races.cpp", program=True)
PYTEST_OPTIONS = ["-q", "-x", "--noconftest", "-p", "no:cacheprovider"]
TESTS_OF_THE_HOST_SIDE, TESTS_OF_THE_RING = TESTS / "test_cuda_host.py", TESTS / "test_ring.py"
SIMPLE_PASS = {"cuda/reduce.cuh": (FOLDER / "simple_pass.cuh").read_text()}


# Its children have torch imported.
fork_server = multiprocessing.get_context("forkserver")
fork_server.set_forkserver_preload(["fake_cuda", "pytest"])


@dataclass(frozen=True)
class Outcome:
    status: int | None  # of the process: below 0 for a signal, None if it took too long
    began: bool  # a test was set up, so that what came then is its doing
    failed: bool  # one that had been set up, in itself or by the faults that were found after it
    output: str

    @property
    def caught(self) -> bool:
        """By a test that fails, or that dies in code which is that broken; not by one that cannot even be set up."""
        return self.failed if self.status == 1 else self.began and self.status is not None and self.status < 0


def run_tests(environment: str, under_test: Path, tests: Path, chosen: str, folder: Path) -> Outcome:
    """Runs the tests of a file whose names have `chosen` in them, with the variable that tells them what to test."""
    output, began, failed = (folder / name for name in ("output", "began", "failed"))
    child = fork_server.Process(target=become_pytest, args=(environment, under_test, tests, chosen, folder))
    child.start()
    child.join(120)
    status = child.exitcode
    if status is None:
        child.kill()
    return Outcome(status, began.exists(), failed.exists(), output.read_text() if output.exists() else "")


def become_pytest(environment: str, under_test: Path, tests: Path, chosen: str, folder: Path) -> None:
    with (folder / "output").open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ[environment] = str(under_test)
    os._exit(pytest.main([*PYTEST_OPTIONS, "-k", chosen, str(tests)], plugins=[Witness(folder)]))


class Witness:
    """Leaves files that say what became of tests, also where the process then dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_runtest_call(self) -> None:
        (self.folder / "began").touch()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when != "setup":
            (self.folder / "failed").touch()


def run_races(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([program], env=environment, capture_output=True, text=True, timeout=300)


def test_no_memory_is_used_that_is_gone() -> None:
    """All of test_cuda_host.py once more: graphs that outlive readings, rings that are outgrown, tables replaced."""
    runtimes = [
        subprocess.run([str(compiler()), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {
        "OVERFLOWSTAT_CUDA_HOST": str(ADDRESS.compile()),
        "LD_PRELOAD": ":".join(runtime.strip() for runtime in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, str(TESTS_OF_THE_HOST_SIDE)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_threads_do_not_race(tmp_path: Path) -> None:
    done = run_races(THREAD.compile(changed(tmp_path, SIMPLE_PASS)))
    assert done.returncode == 0, done.stderr[-6000:]


@dataclass(frozen=True)
class Mutant:
    what: str
    file: str
    old: str
    new: str
    caught_by: str  # part of a test's name, or "races"
    tests: Path = TESTS_OF_THE_HOST_SIDE


MUTANTS = [
    Mutant("all frames have one stamp", "ring.h", "++stamp_", "stamp_ + 1", "used_again_and_again"),
    Mutant(
        "a full ring does not wait", "ring.h", "> capacity_) {\n      const", "> ~0ull) {\n      const", "full_ring"
    ),
    Mutant(
        "an outgrown ring is freed", "cuda/recorder.cpp", "ring_.release();", "ring_.reset();", "longer_than_the_ring"
    ),
    Mutant(
        "a ring that a device is stuck in is freed",
        "cuda/recorder.cpp",
        "ring_.release();",
        "ring_.reset();",
        "stuck_refuses_no_launch",
    ),
    Mutant(
        "a ring that a device is stuck in is kept",
        "cuda/recorder.cpp",
        "    if (frame) return frame;\n",
        '    if (!frame) throw std::runtime_error("the device did not answer in time");\n    return frame;\n',
        "stuck_refuses_no_launch",
    ),
    Mutant(
        "rows that may still be written are given to others",
        "ring.h",
        "if (oldest.timed_out) return nullptr;",
        "static_cast<void>(oldest);",
        "stuck_refuses_no_launch",
    ),
    Mutant(
        "rows that may still be written are given to others, of the ring alone",
        "ring.h",
        "if (oldest.timed_out) return nullptr;",
        "static_cast<void>(oldest);",
        "nobody_elses",
        TESTS_OF_THE_RING,
    ),
    Mutant(
        "a wait is counted again for each who asks",
        "ring.h",
        "    return result_;\n",
        "    waits += !result_.failure.empty();\n    return result_;\n",
        "counted_once",
        TESTS_OF_THE_RING,
    ),
    Mutant(
        "a frame that failed takes the rows with it that came",
        "reading.cpp",
        "      if (result.rows[slot].first) {",
        "      if (result.rows[slot].first && result.failure.empty()) {",
        "breaks_off_has_the_rows",
    ),
    Mutant(
        "a table is taken for another of its length",
        "cuda/memory.cpp",
        "memcmp(list.data(), table.list.data(), list.size() * sizeof(DenseTensor)) == 0",
        "true",
        "sent_once",
    ),
    Mutant(
        "a table is never taken for there",
        "cuda/memory.cpp",
        "tables_.push_front({list, make_table",
        "tables_.push_front({{}, make_table",
        "steady_batch",
    ),
    Mutant(
        "every long list is kept",
        "cuda/memory.cpp",
        "    if (tables_.size() > kTables) tables_.pop_back();",
        "",
        "take_turns_without_being_sent",
    ),
    Mutant(
        "streams share a workspace",
        "cuda/stream.h",
        "stream.device_index(), stream.id()",
        "stream.device_index(), 0",
        "stream_has_a_table_of_its_own",
    ),
    Mutant(
        "devices share a workspace",
        "cuda/stream.h",
        "stream.device_index(), stream.id()",
        "0, stream.id()",
        "each_device_has_a_launch",
    ),
    Mutant(
        "streams share a workspace, as a race",
        "cuda/stream.h",
        "stream.device_index(), stream.id()",
        "stream.device_index(), 0",
        "races",
    ),
    Mutant(
        "a workspace is too small",
        "cuda/memory.cpp",
        "make_workspace(2 * tensors,",
        "make_workspace(tensors - 1,",
        "grow_with_the_lists",
    ),
    Mutant(
        "launches on whatever device is current",
        "cuda/recorder.cpp",
        "const c10::cuda::CUDAGuard guard(device);",
        "",
        "each_device_has_a_launch",
    ),
    Mutant(
        "asks the stream of whatever device is current",
        "cuda/stream.cpp",
        "const c10::cuda::CUDAGuard guard(stream.device_index());",
        "",
        "leaves_the_others_well",
    ),
    Mutant(
        "launches on the default stream",
        "cuda/recorder.cpp",
        "c10::cuda::getCurrentCUDAStream(device);",
        "c10::cuda::CUDAStream(device, 0);",
        "each_device_has_a_launch",
    ),
    Mutant(
        "rows in the order of the list, not of the launch",
        "cuda/recorder.cpp",
        "    std::stable_partition(list.begin(), list.end(), [](const Source* s) { return s->layout->is_dense(); });\n"
        "    std::vector<size_t> entries;\n"
        "    for (const Source* source : list) entries.push_back(source->entry);\n",
        "    std::vector<size_t> entries;\n"
        "    for (const Source* source : list) entries.push_back(source->entry);\n"
        "    std::stable_partition(list.begin(), list.end(), [](const Source* s) { return s->layout->is_dense(); });\n",
        "share_a_launch",
    ),
    Mutant(
        "a refused launch leaves its error to others",
        "cuda/reduce.cu",
        "return taken(error);",
        "return error;",
        "refused_launch_says_so",
    ),
    Mutant(
        "a query leaves its error to others",
        "cuda/reduce.cu",
        "return taken(cudaStreamQuery(stream));",
        "return cudaStreamQuery(stream);",
        "ends_with_an_error_says_so",
    ),
    Mutant(
        "a question about a capture leaves its error to others",
        "cuda/stream.cpp",
        "taken(cudaStreamGetCaptureInfo(stream.stream(), &status, &id, &graph))",
        "cudaStreamGetCaptureInfo(stream.stream(), &status, &id, &graph)",
        "question_that_is_not_answered",
    ),
    Mutant(
        "pinned memory that is not there leaves its error to others",
        "cuda/memory.cpp",
        "taken(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable))",
        "cudaHostAlloc(&memory, bytes, cudaHostAllocPortable)",
        "memory_that_is_not_there",
    ),
    Mutant(
        "pinned memory that cannot be freed leaves its error to others",
        "cuda/memory.cpp",
        "taken(cudaFreeHost(data_))",
        "cudaFreeHost(data_)",
        "cannot_be_freed",
    ),
    Mutant(
        "an owner that cannot be made leaves its error to others",
        "cuda/graph.cpp",
        "taken(cudaUserObjectCreate(&object, holder.get(), release, 1, cudaUserObjectNoDestructorSync))",
        "cudaUserObjectCreate(&object, holder.get(), release, 1, cudaUserObjectNoDestructorSync)",
        "cannot_own_memory",
    ),
    Mutant(
        "a graph that takes no owner leaves its error to others",
        "cuda/graph.cpp",
        "taken(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove))",
        "cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove)",
        "cannot_own_memory",
    ),
    Mutant(
        "an owner that does not go leaves its error to others",
        "cuda/graph.cpp",
        "taken(cudaUserObjectRelease(object, 1))",
        "cudaUserObjectRelease(object, 1)",
        "cannot_own_memory",
    ),
    Mutant(
        "a device that has failed makes the wait throw",
        "cuda/stream.cpp",
        "const CaptureState state = capture_state(stream);\n    if",
        "const CaptureState state{cudaSuccess, capture_of(stream)};\n    if",
        "survive_it",
    ),
    Mutant(
        "torch's exceptions leave the wait",
        "cuda/stream.cpp",
        "} catch (const c10::Error& error) {\n    return {Progress::kFailed, words(error)};\n  }",
        "} catch (const std::bad_function_call&) {\n    throw;\n  }",
        "is_no_reason_to_wait",
    ),
    Mutant(
        "a captured stream is queried",
        "cuda/stream.cpp",
        "if (state.capture || is_in_the_way(state.error))",
        "if (is_in_the_way(state.error))",
        "frames_of_before_a_capture",
    ),
    Mutant(
        "a capture that has failed loses what ran before it",
        "cuda/stream.cpp",
        "return error == cudaErrorStreamCaptureInvalidated || ",
        "return ",
        "before_a_capture_that_has_failed",
    ),
    Mutant(
        "one row of a replayed reading costs what all do",
        "reading.cpp",
        "  return found(i);\n",
        "  for (size_t other = 0; other < entries_.size(); ++other) found(other);\n  return found(i);\n",
        "without_the_others",
    ),
    Mutant(
        "a default stream that a capture is in the way of loses what it runs",
        "cuda/stream.cpp",
        " || error == cudaErrorStreamCaptureImplicit",
        "",
        "while_a_stream_that_blocks_it",
    ),
    Mutant(
        "a replay counts when it has written the first row",
        "replayed_rows.h",
        "for (size_t i = 0; i < count_; ++i)",
        "for (size_t i = 0; i < 1; ++i)",
        "every_row_of_a_reading",
    ),
    Mutant(
        "a replay counts when the last device has written its rows",
        "reading.cpp",
        "replays.count = std::min(replays.count, rows->replays());",
        "replays.count = rows->replays();",
        "every_device_in_it",
    ),
    Mutant(
        "a replay counts when the first device has written its rows",
        "reading.cpp",
        "replays.count = std::min(replays.count, rows->replays());",
        "if (replays.count == ~uint64_t{0}) replays.count = rows->replays();",
        "every_device_in_it",
    ),
    Mutant(
        "a query without the relaxed mode",
        "cuda/stream.cpp",
        "    const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);\n"
        "    const Error",
        "    const Error",
        "survives_all_that_another_does",
    ),
    Mutant(
        "pinned memory without the relaxed mode",
        "cuda/memory.cpp",
        "  const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);\n  const size_t",
        "  const size_t",
        "survives_all_that_another_does",
    ),
    Mutant(
        "torch's memory without the relaxed mode",
        "cuda/memory.cpp",
        "  const c10::cuda::CUDAStreamCaptureModeGuard allowed_anywhere(cudaStreamCaptureModeRelaxed);\n  try",
        "  try",
        "survives_all_that_another_does",
    ),
    Mutant(
        "a captured launch has the host's stamp",
        "cuda/recorder.cpp",
        "rows.get(), kNextStamp,",
        "rows.get(), 1,",
        "anew_and_is_counted",
    ),
    Mutant(
        "a captured launch takes rows of the ring",
        "cuda/recorder.cpp",
        "const std::shared_ptr<StampedRow> rows = graph->rows(slots);",
        "const std::shared_ptr<StampedRow> rows(begin_frame(slots, poll_of(stream), reading)->rows(), "
        "[](StampedRow*) {});",
        "ring_is_not_touched",
    ),
    Mutant(
        "a graph does not own its memory",
        "cuda/graph.cpp",
        "  give(capture->graph, std::make_unique<Leavings::Holder>(memory), &GraphMemory::release);\n",
        "  if (capture->id == 0) give(capture->graph, std::make_unique<Leavings::Holder>(memory), &release);\n",
        "replayed_after_its_readings_are_gone",
    ),
    Mutant(
        "a graph shares its table with what is launched elsewhere",
        "cuda/graph.cpp",
        "  kept_.push_back(outside_of_the_capture(stream.device(), limit_, "
        "[&] { return make_table(list, stream.device()); }));\n"
        "  return static_cast<const DenseTensor*>(kept_.back().data_ptr());",
        "  static StreamMemory shared;\n"
        "  outside_of_the_capture(stream.device(), limit_, [&] { shared.table(list, stream); return at::Tensor(); });\n"
        "  return shared.table(list, stream);",
        "tables_that_nothing_else",
    ),
    Mutant(
        "a table is sent in each replay",
        "cuda/graph.cpp",
        "outside_of_the_capture(stream.device(), limit_, [&] { return make_table(list, stream.device()); })",
        "make_table(list, stream.device())",
        "tables_that_nothing_else",
    ),
    Mutant(
        "a workspace is made in each replay",
        "cuda/graph.cpp",
        "workspace = outside_of_the_capture(stream.device(), limit_, ",
        "workspace = std::invoke(",
        "captured_and_the_capture_stays_valid",
    ),
    Mutant(
        "a graph has one workspace for all streams",
        "cuda/graph.cpp",
        "workspaces_[key_of(stream)]",
        "workspaces_[{}]",
        "fork_in_a_capture",
    ),
    Mutant(
        "a graph's memory is made on a stream that is captured",
        "cuda/graph.cpp",
        "state.error == 0 && !state.capture",
        "state.error == 0",
        "on_a_stream_that_is_not_captured",
    ),
    Mutant(
        "a graph's memory is not waited for",
        "cuda/graph.cpp",
        "wait_until([] { return false; }, poll_of(aside), limit);",
        "wait_until([] { return true; }, poll_of(aside), limit);",
        "two_captures_at_once",
    ),
    Mutant(
        "rows that are used again keep their stamps",
        "cuda/graph.cpp",
        "      std::fill_n(slab->data(), slab->count(), StampedRow{});\n",
        "",
        "gone_is_used_again",
    ),
    Mutant(
        "rows of graphs that are gone are never used again",
        "cuda/graph.cpp",
        "for (auto& slab : slabs_) leavings().slabs.push_back(std::move(slab));",
        "for (auto& slab : slabs_) slab.release();",
        "gone_is_used_again",
    ),
    Mutant(
        "replays are waited for on the stream of the capture",
        "cuda/recorder.cpp",
        "poll_of_current_stream(device)",
        "poll_of(stream)",
        "not_waited_for_inside",
    ),
    Mutant(
        "launches of several threads at once",
        "cuda/recorder.cpp",
        "  const std::lock_guard<std::mutex> lock(mutex_);\n",
        "",
        "races",
    ),
    Mutant(
        "graphs go while their memory is given out",
        "cuda/graph.cpp",
        "  *(*holder)->graph_is_gone_ = true;\n  const std::lock_guard<std::mutex> lock(leavings().mutex);\n",
        "  *(*holder)->graph_is_gone_ = true;\n",
        "races",
    ),
    Mutant(
        "a reading that two threads ask",
        "reading.cpp",
        "  const std::lock_guard<std::mutex> lock(mutex_);\n  fetch(limit);\n  std::vector",
        "  fetch(limit);\n  std::vector",
        "races",
    ),
]


RACES = ("data race", "heap-use-after-free")  # what a race comes to, as it is met first


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_broken_host_side_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    source = (CSRC / mutant.file).read_text()
    assert source.count(mutant.old) == 1, "the code that this mutant breaks has changed"
    changes = {mutant.file: source.replace(mutant.old, mutant.new)}
    if mutant.caught_by == "races":
        program = THREAD.compile(changed(tmp_path / "csrc", {**SIMPLE_PASS, **changes}), tmp_path)
        done = run_races(program)
        assert any(f"ThreadSanitizer: {what}" in done.stderr for what in RACES), f"not caught: {done.returncode}"
        return
    csrc = changed(tmp_path / "csrc", changes)
    if mutant.tests == TESTS_OF_THE_RING:
        outcome = run_tests("OVERFLOWSTAT_CSRC", csrc, mutant.tests, mutant.caught_by, tmp_path)
    else:
        library = PLAIN.compile(csrc, tmp_path)
        outcome = run_tests("OVERFLOWSTAT_CUDA_HOST", library, mutant.tests, mutant.caught_by, tmp_path)
    assert outcome.caught, f"not caught, exit {outcome.status}: {outcome.output[-3000:]}"


@pytest.mark.parametrize("broken", ["is not there", "is none", "dies when it is loaded"])
def test_a_library_that_cannot_be_tested_is_not_taken_for_a_mutant_that_is_caught(tmp_path: Path, broken: str) -> None:
    library = tmp_path / "host.so"
    if broken == "is none":
        library.write_text("not a library")
    elif broken == "dies when it is loaded":
        source = tmp_path / "dies.cpp"
        source.write_text("#include <cstdlib>\n[[gnu::constructor]] static void die() { abort(); }\n")
        subprocess.run([str(compiler()), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    outcome = run_tests("OVERFLOWSTAT_CUDA_HOST", library, TESTS_OF_THE_HOST_SIDE, "ready_never_asks", tmp_path)
    assert outcome.status == (-signal.SIGABRT if "dies" in broken else 1), outcome.output
    assert not outcome.began and not outcome.caught


def test_a_library_that_is_sound_or_a_test_that_is_not_there_catches_nothing(tmp_path: Path) -> None:
    library = PLAIN.compile()
    for chosen, status in (("ready_never_asks", 0), ("no_such_test", 5)):
        folder = tmp_path / chosen
        folder.mkdir()
        outcome = run_tests("OVERFLOWSTAT_CUDA_HOST", library, TESTS_OF_THE_HOST_SIDE, chosen, folder)
        assert outcome.status == status and outcome.began == (status == 0) and not outcome.caught
