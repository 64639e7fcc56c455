"""Which models `overflowstat run` finds, how it names them, and what it leaves alone. On the native recorder."""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path

import pytest
from running import Ended, Server, python, write

from overflowstat import load_trace

BEGIN = """
import sys, torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return x.log()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.log = Log()
        nn.init.ones_(self.first.weight)
        nn.init.zeros_(self.first.bias)
    def forward(self, x):
        return self.log(self.first(x))

good, zeros = torch.ones(3, 2), torch.zeros(3, 2)  # of which Net makes log(2), and log(0)
"""


class Runs:
    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self.folder = folder

    def __call__(self, script: str, *options: str, **environment: str) -> Ended:
        write(self.folder, "train.py", BEGIN + textwrap.dedent(script))
        return self._server.run(self.folder, *options, "train.py", environment=environment)


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Runs:
    return Runs(server, tmp_path)


def errors_of(ended: Ended) -> list[str]:
    """The error that ended a script, by its lines."""
    text = ended.errors[ended.errors.rindex("overflowstat.errors.NonFiniteError: ") :]
    return text.removeprefix("overflowstat.errors.NonFiniteError: ").splitlines()


def test_bad_numbers_end_the_script_with_a_report_and_its_traceback(run: Runs) -> None:
    ended = run("""
        def train():
            net = Net()
            net(good)
            net(zeros)
            print("went on")
        train()
    """)
    assert ended.status == 1 and "went on" not in ended.output
    assert ended.told[0] == "overflowstat: watching model 1 (Net), 3 modules"
    first = (
        "overflowstat: model 1 (Net): inf in batch 1, first in log (Log), output: 6 of 6 are -inf, first at [0, 0], "
        "3 of 3 rows wholly; float32, shape [3, 2]"
    )
    assert errors_of(ended)[0] == first and first in ended.output
    lines = ended.others.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    files = [line for line in lines if line.startswith("  File")]
    assert files[:2] == [
        f'  File "{run.folder}/train.py", line 26, in <module>',
        f'  File "{run.folder}/train.py", line 24, in train',
    ]


def test_what_the_script_catches_does_not_end_it(run: Runs) -> None:
    ended = run("""
        from overflowstat import NonFiniteError
        net = Net()
        for x in (zeros, good, zeros):
            try:
                net(x)
            except NonFiniteError as error:
                print("caught", error.batch_number)
    """)
    assert ended.status == 0 and ended.others == ""
    assert [line for line in ended.output.splitlines() if "caught" in line] == ["caught 0", "caught 2"]


def test_several_models_and_a_loss_have_names(run: Runs) -> None:
    """A loss that stays is watched from its first call; of one that is made anew only the first."""
    ended = run(
        """
        class Other(Net): pass
        class Whole(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module
            def forward(self, x):
                return self.module(x)
        net, other, loss = Net(), Whole(Other()), nn.MSELoss()
        for _ in range(3):
            loss(net(good), good)
            nn.L1Loss()(other(good), good)
            nn.ReLU()(nn.functional.relu(good))
        loss(good, zeros.log())
        """,
        "--max-frames-to-save",
        "1",
    )
    assert ended.status == 1
    assert ended.told == [
        "overflowstat: watching model 1 (Net), 3 modules",
        "overflowstat: watching model 2 (MSELoss), 1 module",
        "overflowstat: watching model 3 (Whole of Other), 4 modules",
        "overflowstat: watching model 4 (L1Loss), 1 module",
        "overflowstat: watching model 5 (ReLU), 1 module",
        "overflowstat: not watched: 2 more L1Loss, without weights and called once each",
        "overflowstat: not watched: 2 more ReLU, without weights and called once each",
    ]
    assert errors_of(ended)[0].startswith(
        "overflowstat: model 2 (MSELoss): inf in batch 3, first in the model itself (MSELoss), input[1]: 6 of 6"
    )


def test_a_second_loss_of_a_class_is_watched_from_its_second_call_on(run: Runs) -> None:
    ended = run("""
        first, second = nn.MSELoss(), nn.MSELoss()
        first(good, good)
        second(good, good)
        second(good, good)
        second(good, zeros.log())
    """)
    assert ended.told[1] == "overflowstat: watching model 2 (MSELoss), 1 module"
    assert "model 2 (MSELoss): inf in batch 1, " in errors_of(ended)[0]


def test_the_first_forward_is_watched_as_all_others(run: Runs) -> None:
    """Its keyword inputs, its batch, what else it raises, and whether it may be run again for a verdict."""
    ended = run("""
        class Whole(Net):
            def forward(self, x, *, y, index):
                return self.first(x / y)[index]
        try:
            Whole()(good, y=zeros, index=0)
        except ValueError as error:
            print(error.verdict.to_json()["module"], error.verdict.operation, [f.module for f in error.frames])
        class Raises(Net):
            def forward(self, x, *, y, index):
                self.inner = x / y
                return x[index]
        try:
            Raises()(good, y=zeros, index=7)
        except IndexError as error:
            print(hasattr(error, "non_finite"))
        whole = Whole()
        whole(good, y=good, index=0)
        whole(good, y=good, index=0)
        whole(good, y=zeros, index=0)
    """)
    lines = ended.output.splitlines()
    assert any(line.startswith(" aten.div") for line in lines), ended.output
    assert "inf in batch 2, first in first (Linear), input[0]" in errors_of(ended)[0]


def test_a_first_forward_that_raises_after_its_numbers_went_bad_says_so(run: Runs) -> None:
    ended = run(
        """
        class Raises(Net):
            def forward(self, x):
                super().forward(x)
                raise IndexError("mine")
        Raises()(zeros)
        """,
        "--allow",
        "log=-inf",
        "--include",
        "log",
    )
    assert ended.status == 1 and ended.others.splitlines()[-1] == "IndexError: mine"


def test_a_part_that_is_called_first_is_handed_over_to_the_whole(run: Runs) -> None:
    ended = run("""
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.decoder = Net(), nn.Linear(2, 2)
            def forward(self, x):
                return self.decoder(self.encoder(x))
        whole = Whole()
        whole.decoder(good)
        whole.encoder(good)
        whole(good)
        whole.encoder(good)
        hooks = sum(len(m._forward_hooks) for m in whole.modules())
        assert hooks == len(list(whole.modules())), hooks
        whole(zeros)
    """)
    assert ended.told[:3] == [
        "overflowstat: watching model 1 (Linear), 1 module",
        "overflowstat: watching model 2 (Net), 3 modules",
        "overflowstat: watching model 1 (Whole), 5 modules, which holds model 1 (Linear) and model 2 (Net)",
    ]
    assert errors_of(ended)[0].startswith("overflowstat: model 1 (Whole): inf in batch 1, first in encoder.log (Log)")


def test_a_part_that_comes_later_is_none(run: Runs) -> None:
    ended = run("""
        whole = nn.Sequential(nn.Identity())
        whole(good)
        whole.append(Net())
        whole(good)
        whole[1](good)
        whole(zeros.log())
    """)
    assert [line for line in ended.told if "watch" in line] == [
        "overflowstat: watching model 1 (Sequential), 2 modules"
    ]
    assert "model 1 (Sequential): inf in batch 2, first in 0 (Identity), input[0]" in errors_of(ended)[0]


def test_where_only_parts_are_called_each_is_a_model(run: Runs) -> None:
    ended = run("""
        class Task(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.loss = Net(), nn.MSELoss()
            def training_step(self, x):
                return self.loss(self.net(x), x)
        task = Task()
        task.training_step(good)
        task.training_step(zeros)
    """)
    assert ended.told[:2] == [
        "overflowstat: watching model 1 (Net), 3 modules",
        "overflowstat: watching model 2 (MSELoss), 1 module",
    ]
    assert "model 1 (Net): inf in batch 1, first in log" in errors_of(ended)[0]


def test_calls_of_parts_alone_are_a_batch_an_optimizer_step(run: Runs) -> None:
    """Or else their weights would be read once and for all."""
    ended = run("""
        class Task(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = Net()
            def forward(self, x):
                return self.net(x)
        task = Task()
        task(good)
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
        for _ in range(3):
            task.net(good).sum().backward()
            optimizer.step()
        with torch.no_grad():
            task.net.first.weight.fill_(torch.nan)
        optimizer.step()
        task.net(good)
    """)
    assert ended.told[0] == "overflowstat: watching model 1 (Task), 4 modules"
    assert "MonitorWarning" not in ended.errors
    assert "nan in batch 4, first in net.first (Linear), weight" in errors_of(ended)[0]


def test_to_warn_goes_on_and_sums_up_in_the_end(run: Runs) -> None:
    """Also of models that are gone by then, and of a script that hides warnings."""
    ended = run(
        """
        import gc, warnings, weakref
        warnings.simplefilter("ignore")
        def train():
            net = Net()
            for x in (good, zeros, good, zeros):
                net(x)
            return weakref.ref(net)
        gone = train()
        gc.collect()
        print("gone", gone())
        """,
        "--on-detect",
        "warn",
    )
    assert ended.status == 0 and ended.others == ""
    assert ended.output.count("Detected inf/nan") == 1 and "gone None" in ended.output
    assert ended.told == [
        "overflowstat: watching model 1 (Net), 3 modules",
        "overflowstat: model 1 (Net): bad numbers in log (Log), output: in 2 batches, from 1 to 3",
    ]


def test_what_is_wholly_good_is_said_to_be(run: Runs) -> None:
    assert run("Net()(good)").told[1:] == ["overflowstat: nothing bad was seen"]
    assert run("Net()(good)", "--quiet").told == []


@pytest.mark.parametrize(("ending", "status"), [("", 1), ("sys.exit(0)", 1), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_numbers_that_are_judged_in_the_end(run: Runs, ending: str, status: int) -> None:
    """As on a GPU with `--check step`: they are an error, unless the script has one already."""
    ended = run(f"""
        from overflowstat import Monitor, NonFiniteError
        Net()(good)
        def late(self):
            raise NonFiniteError("bad in the end", 0, ())
        Monitor.check = late
        {ending}
    """)
    assert ended.status == status
    assert ("NonFiniteError: bad in the end" in ended.others) == (status == 1 and ending != "1 / 0")
    assert ("ZeroDivisionError" in ended.others) == (ending == "1 / 0")


def test_an_interrupt_in_the_end_is_one(run: Runs) -> None:
    ended = run("""
        from overflowstat import Monitor
        Net()(good)
        def interrupted(self):
            raise KeyboardInterrupt
        Monitor.check = interrupted
    """)
    assert ended.status == -2 and ended.others.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "spoil",
    [
        "sys.stderr.close()",
        "sys.stderr = None",
        "import os; os.close(2)",
        "sys.stderr = open('/dev/full', 'w', buffering=1)",
        "sys.stdout.close()",
        "sys.stdout = None",
        "import os; os.close(1)",
        "sys.stdout = open('/dev/full', 'w', buffering=1)",
        "import os; os.closerange(0, 3)",
    ],
)
@pytest.mark.parametrize("on_detect", ["raise", "warn"])
def test_a_script_that_closes_its_streams_goes_on(run: Runs, spoil: str, on_detect: str) -> None:
    script = f"""
        {spoil}
        try:
            Net()(zeros)
        except BaseException as error:
            open("raised", "w").write(type(error).__name__)
        import os
        os._exit(7) if "/dev/full" in {spoil!r} or "close(1)" in {spoil!r} else sys.exit(7)
    """
    assert run(script, "--on-detect", on_detect).status == 7
    raised = run.folder / "raised"
    assert raised.exists() == (on_detect == "raise")
    assert not raised.exists() or raised.read_text() == "NonFiniteError"


def test_what_a_script_captures_of_stderr_is_its_own(run: Runs) -> None:
    ended = run("""
        import contextlib, io
        captured = io.StringIO()
        with contextlib.redirect_stderr(captured):
            Net()(good)
            print("mine", file=sys.stderr)
        print(repr(captured.getvalue()))
    """)
    assert ended.output == "'mine\\n'\n" and ended.others == ""
    assert ended.told == ["overflowstat: watching model 1 (Net), 3 modules", "overflowstat: nothing bad was seen"]


def test_a_thread_that_goes_on_is_watched(run: Runs) -> None:
    """And one that calls a model of its own; what a model keeps in a plain list is no model."""
    ended = run(
        """
        import threading, time
        class Keeps(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.own = [nn.Linear(2, 2)], nn.Linear(2, 2)
            def forward(self, x):
                return self.own(self.hidden[0](x))
        def late():
            threading.main_thread().join()
            keeps(good)
            keeps(zeros.log())
        keeps, net = Keeps(), Net()
        threads = [threading.Thread(target=model, args=(good,)) for model in (keeps, net)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        threading.Thread(target=late).start()
        """,
        "--on-detect",
        "warn",
    )
    assert ended.status == 0
    assert sorted(line.split(" (")[1] for line in ended.told if "watching" in line) == [
        "Keeps), 2 modules",
        "Net), 3 modules",
    ]
    assert ended.told[-1].endswith("(Keeps): bad numbers in own (Linear), input[0]: in batch 2")


WORKERS = """
    from torch.utils.data import DataLoader, Dataset
    from torch.nn.modules.module import _global_forward_pre_hooks
    class Made(Dataset):
        transform = Net()
        def __len__(self):
            return 2
        def __getitem__(self, number):
            self.transform(torch.zeros(3, 2))  # is bad, and nobody looks
            hooks = sum(len(each._forward_hooks) for each in self.transform.modules())
            return torch.tensor([len(_global_forward_pre_hooks), hooks, "overflowstat.running" in sys.modules])
    if __name__ == "__main__":
        made = Made()
        made.transform(good)
        net = nn.Linear(3, 3)
        for batch in DataLoader(made, num_workers=1, multiprocessing_context=METHOD):
            net(batch.float())
            print(batch.tolist())
"""


def test_workers_that_are_forked_are_not_watched(run: Runs) -> None:
    ended = run(f"METHOD = 'fork'\n{textwrap.dedent(WORKERS)}", "--trace-file", "t.jsonl")
    assert (ended.status, ended.others) == (0, "")
    assert ended.output == "[[0, 0, 1]]\n" * 2
    assert len(ended.told) == 3  # two models, nothing bad
    assert sorted(path.name for path in run.folder.glob("*.jsonl")) == ["t.jsonl", "t.model2.jsonl"]
    assert load_trace(run.folder / "t.model2.jsonl").is_complete


@pytest.mark.slow
def test_workers_that_are_spawned_are_not_watched(tmp_path: Path) -> None:
    write(tmp_path, "train.py", f"{BEGIN}\nMETHOD = 'spawn'\n{textwrap.dedent(WORKERS)}")
    ended = python(tmp_path, "-m", "overflowstat", "run", "train.py", environment={"OVERFLOWSTAT_OPTIONS": "--quiet"})
    assert (ended.status, ended.errors) == (0, "")
    assert ended.output == "[[0, 0, 0]]\n" * 2


def test_a_script_that_forks_itself(run: Runs) -> None:
    ended = run("""
        import os
        net = Net()
        net(good)
        child = os.fork()
        print(net(zeros if child == 0 else good).tolist()[0], flush=True)
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert ended.status == 0
    assert sorted(ended.output.splitlines()) == ["0", "[-inf, -inf]", "[0.6931471824645996, 0.6931471824645996]"]
    assert ended.told[1:] == ["overflowstat: nothing bad was seen"]


def test_what_the_script_watches_itself_is_left_to_it(run: Runs) -> None:
    ended = run("""
        from overflowstat import Monitor
        net = Net()
        monitor = Monitor(net)
        net(good)
        net(good)
        print(monitor.total_calls, [len(m._forward_hooks) for m in net.modules()])
    """)
    assert ended.output == "6 [1, 1, 1]\n" and ended.others == ""
    assert ended.told[0] == "overflowstat: Net is watched by the program itself, and left to that"


def test_a_model_that_cannot_be_watched_runs_all_the_same(run: Runs) -> None:
    ended = run("""
        net = Net()
        net(good)
        parallel = nn.DataParallel(net)
        print(parallel(good).shape, net(good).shape)
    """)
    assert (ended.status, ended.output) == (0, "torch.Size([3, 2]) torch.Size([3, 2])\n")
    assert ended.told[1].startswith("overflowstat: DataParallel of Net is not watched: model is an nn.DataParallel")


def test_calls_that_compute_nothing_are_no_models(run: Runs) -> None:
    """Nor are recomputed ones."""
    ended = run("""
        from torch._subclasses import FakeTensorMode
        from torch.utils.checkpoint import checkpoint
        torch.export.export(Net(), (good,))
        torch.jit.trace(Net(), (good,), check_trace=False)
        torch.fx.symbolic_trace(Net())
        with FakeTensorMode() as mode:
            Net()(torch.ones(3, 2))
        print("here", flush=True)
        print("here", file=sys.stderr, flush=True)
        outer = Net()
        def forward(x):
            if torch._C._current_graph_task_id() != -1:
                return Inner()(x)
            return outer(x)
        class Inner(Net): pass
        checkpoint(forward, good.clone().requires_grad_(), use_reentrant=False).sum().backward()
        traced = torch.fx.symbolic_trace(Net())
        traced(good)
    """)
    before, after = ended.errors.split("here\n")
    assert before == "" or "watching" not in before
    watched = [line for line in after.splitlines() if "watching" in line]
    assert [line.split(" (")[1] for line in watched] == ["Net), 3 modules", "Net), 2 modules"]


def test_scripted_and_traced_models_are_watched_as_far_as_they_take_hooks(run: Runs) -> None:
    ended = run("""
        import warnings
        warnings.simplefilter("ignore", FutureWarning)  # of torch.jit itself
        for model in (torch.jit.script(Net()), torch.jit.trace(Net(), (good,), check_trace=False)):
            model(good)
            try:
                model(zeros)
            except ValueError as error:
                print("found", error.batch_number)
    """)
    assert (ended.status, ended.others) == (0, ""), ended.errors
    assert [line for line in ended.output.splitlines() if "found" in line] == ["found 1"]
    assert ended.told[0].startswith("overflowstat: RecursiveScriptModule is not watched: model is a RecursiveScriptMo")
    assert ended.told[1] == "overflowstat: watching model 1 (TopLevelTracedModule), 3 modules"


def test_traces_and_reports_go_where_they_are_to(run: Runs) -> None:
    """Options of the environment hold, too, and give way to those of the command line."""
    script = """
        import logging
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s", stream=sys.stderr)
        net, loss = Net(), nn.MSELoss()
        for _ in range(2):
            loss(net(good), good)
        net(zeros)
    """
    ended = run(
        script,
        "--trace-file",
        "t.jsonl.gz",
        "--sink",
        "logging",
        OVERFLOWSTAT_OPTIONS="--on-detect warn --trace-file 'not this.jsonl' --max-frames-to-save 2",
    )
    assert ended.status == 0 and ended.output == ""
    assert "frames to t.jsonl.gz" in ended.told[0] and "frames to t.model2.jsonl.gz" in ended.told[1]
    assert "overflowstat ERROR \nDetected inf/nan during batch_number=2\nLast 2 forward frames:" in ended.errors
    net, loss = load_trace(run.folder / "t.jsonl.gz"), load_trace(run.folder / "t.model2.jsonl.gz")
    assert net.is_complete and loss.is_complete
    assert sorted(path.name for path in run.folder.iterdir()) == ["t.jsonl.gz", "t.model2.jsonl.gz", "train.py"]


def test_traced_batches_say_of_which_model_they_are(run: Runs) -> None:
    ended = run("Net()(good); nn.Linear(2, 2)(good)", "--trace-batch-nums", "0")
    begun = [line.strip() for line in ended.output.splitlines() if "***" in line]
    assert begun == [
        "*** Starting batch number=0 of model 1 (Net) ***",
        "*** Starting batch number=0 of model 2 (Linear) ***",
    ]


def test_a_run_that_is_to_stop_stops(run: Runs) -> None:
    ended = run("net = Net()\nfor _ in range(9): net(good)", "--abort-after-batch-num", "1")
    assert ended.status == 1
    assert ended.others.splitlines()[-1] == (
        "overflowstat.errors.BatchLimitReached: overflowstat: model 1 (Net): stopped after 2 batches, as "
        "abort_after_batch_num=1 asks"
    )


def test_gradients_are_watched_if_asked_for(run: Runs) -> None:
    ended = run(
        """
        net = nn.Linear(2, 1)
        net(good).sum().backward()
        (net(good).sum() * torch.inf).backward()
        """,
        "--gradients",
    )
    assert ended.status == 1 and "inf in batch 1, first in the model itself (Linear), grad output" in ended.errors


def test_a_trace_that_cannot_be_made_when_it_is_to_be_ends_the_run(run: Runs) -> None:
    (run.folder / "gone").mkdir()
    ended = run(
        """
        import os
        os.rmdir("gone")
        try:
            Net()(good)
        except Exception:
            print("caught")
        """,
        "--trace-file",
        "gone/t.jsonl",
    )
    assert (ended.status, ended.output) == (2, "")
    assert ended.told == ["overflowstat: 'gone/t.jsonl' cannot be written: there is no folder 'gone'"]


@pytest.mark.slow
def test_compiled_models_are_found_and_what_the_compiler_makes_is_not(run: Runs) -> None:
    """And functions that are compiled whole keep their one graph, if the models in them are not watched."""
    ended = run(
        """
        import warnings
        warnings.filterwarnings("error", "Using .torch.compile")
        from torch._dynamo.utils import counters
        def returns(graph, inputs):
            return graph
        for backend in ("aot_eager", returns):
            for how in ("module", "in place", "function"):
                torch._dynamo.reset()
                net = Net()
                if how == "in place":
                    net.compile(backend=backend)
                    call = net
                else:
                    call = torch.compile(net if how == "module" else lambda x: net(x) * 2, backend=backend)
                for _ in range(3):
                    call(good)
                try:
                    call(zeros)
                except ValueError as error:
                    print(str(error).split(":")[2].split(",")[0])
        torch._dynamo.reset()
        counters.clear()
        net.requires_grad_(False)
        whole = torch.compile(lambda x: torch.relu(x) + 1, backend="eager", fullgraph=True)
        print(whole(good).sum().item())
        """
    )
    assert ended.status == 0, ended.errors
    assert ended.output.splitlines().count(" inf in batch 3") == 6, ended.output
    names = [line.split("(")[1].split(")")[0] for line in ended.told if "watching" in line]
    assert names == ["OptimizedModule of Net", "Net", "Net"] * 2


@pytest.mark.slow
def test_it_works_under_a_launcher(tmp_path: Path) -> None:
    """Two ranks; the second one's numbers go bad."""
    write(
        tmp_path,
        "train.py",
        BEGIN
        + textwrap.dedent("""
            import torch.distributed as dist
            dist.init_process_group("gloo")
            net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), Log()))
            with torch.no_grad():
                net.module[0].weight.fill_(1)
                net.module[0].bias.fill_(0)
            net(good)
            if dist.get_rank() == 1:
                net(zeros)
            dist.barrier()
        """),
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "overflowstat", "run"]
    ended = python(tmp_path, *launch, "--trace-file", "t.jsonl", "train.py")
    assert ended.status == 1
    rank = f"rank 1 of 2 ({socket.gethostname()}, cpu)"
    model = "model 1 (DistributedDataParallel of Sequential)"
    assert f"{model}: {rank}: inf in batch 1, first in 1 (Log)" in ended.errors
    assert (
        "overflowstat: rank 0 of 2: watching model 1 (DistributedDataParallel of Sequential), 4 modules" in ended.errors
    )
    assert "rank 1 of 2: watching" not in ended.errors
    traces = [load_trace(tmp_path / f"t.rank{rank}.jsonl") for rank in (0, 1)]
    assert [trace.header.rank for trace in traces] == [0, 1]
    assert {frame.module for trace in traces for frame in trace.frames} == {"", "0", "1"}
