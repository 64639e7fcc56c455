"""Whether processes can communicate: with all of them there, and with one that is missing, dead, stopped or cut off."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port

from overflowstat import communication
from overflowstat.communication import Launch
from overflowstat.presence import Member, Presence, connect

HOST = socket.gethostname()
LONG = 120.0  # seconds, after which a test has hung
TIMEOUT = "6"
VERSIONS = f"torch {torch.__version__}{f', CUDA {torch.version.cuda}' if torch.version.cuda else ''}, gloo"
NO_STORE = "; the store of all, which rank 0 or its launcher keeps, does not answer"

# A rank, which starts when it is told to, since importing torch may take one of them longer than a stage may; something
# may befall it in place of a function of the check.
RANK = """
import os, signal, sys
from overflowstat import communication
from overflowstat.cli import main
{befall}
print("ready", flush=True)
sys.stdin.readline()
sys.exit(main(["check-distributed", *sys.argv[1:]]))
"""
BEFALL = """
def befall(*_):
    {what}

communication.{function} = befall
"""


class Ranks:
    """Processes as a launcher starts them, but for the launcher."""

    def __init__(self, size: int, host: str = "localhost") -> None:
        self.size = size
        self.port = free_port()
        self.host = host
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def add(self, rank: int, befall: str = "", before: Sequence[str] = (), **env: str) -> None:
        ours = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
        }
        self.processes[rank] = subprocess.Popen(
            [*before, sys.executable, "-c", RANK.format(befall=befall), "--backend", "gloo", "--timeout", TIMEOUT],
            env=os.environ | ours | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        for process in self.processes.values():
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def ended(self, rank: int) -> tuple[int, str]:
        """(exit status, the line that it printed)"""
        out, err = self.processes[rank].communicate(timeout=LONG)
        lines = [line for line in out.splitlines() if line.startswith("[")]
        assert len(lines) == 1, out + err
        assert out.endswith(f"\n{VERSIONS}\n") == (rank == 0), out
        return self.processes[rank].returncode, lines[0]

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(2)
    yield found
    found.kill()


def test_all_ranks_are_ok_and_the_first_tells_the_versions(ranks: Ranks) -> None:
    ranks.add(0)
    ranks.add(1)
    ranks.start()
    out, err = ranks.processes[0].communicate(timeout=LONG)
    assert out == f"[{HOST}-0] is OK (global rank: 0/2)\n{VERSIONS}\n", err
    assert ranks.ended(1) == (0, f"[{HOST}-1] is OK (global rank: 1/2)")
    assert ranks.processes[0].returncode == 0


def test_a_rank_that_never_starts_is_named(ranks: Ranks) -> None:
    ranks.add(0)
    ranks.start()
    status, line = ranks.ended(0)
    assert status == 1 and line == (
        f"[{HOST}-0] FAILED (global rank: 0/2): finding each other did not end within {TIMEOUT} s; "
        "no sign of life from rank 1, which never started"
    )


@pytest.mark.parametrize(
    ("function", "what", "stage"),
    [
        ("_all_reduce", "os._exit(3)", "all-reduce"),
        ("_each_pair", "os.kill(os.getpid(), signal.SIGKILL)", "each pair"),
        ("_all_reduce", "os.kill(os.getpid(), signal.SIGSTOP)", "all-reduce"),
    ],
    ids=["exits", "is killed", "is stopped"],
)
@pytest.mark.slow
def test_a_rank_that_falls_silent_is_named_by_the_others(ranks: Ranks, function: str, what: str, stage: str) -> None:
    ranks.add(0)
    ranks.add(1, BEFALL.format(function=function, what=what))
    ranks.start()
    status, line = ranks.ended(0)
    assert status == 1 and re.fullmatch(
        rf"\[{HOST}-0\] FAILED \(global rank: 0/2\): {stage} .*; no sign of life from rank 1 \[{HOST}-1\]", line
    )


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_the_others_and_tells_itself(ranks: Ranks) -> None:
    ranks.add(0)
    ranks.add(1, BEFALL.format(function="_memory", what="__import__('time').sleep(1000)"))
    ranks.start()
    status, line = ranks.ended(0)
    assert status == 1 and line.endswith(f"memory did not end within {TIMEOUT} s; not so far yet: rank 1 [{HOST}-1]")
    status, line = ranks.ended(1)
    assert status == 1 and f"memory did not end within {TIMEOUT} s" in line


@pytest.mark.slow
def test_a_wrong_answer_is_told(ranks: Ranks) -> None:
    zeros = "import torch; torch.distributed.all_reduce(torch.zeros(communication.NUMBERS))"
    ranks.add(0)
    ranks.add(1, BEFALL.format(function="_all_reduce", what=zeros))
    ranks.start()
    status, line = ranks.ended(0)
    assert status == 1 and "all-reduce failed (RuntimeError: the sum over all ranks is wrong in 1048576 of" in line
    assert ranks.ended(1)[0] == 1


@pytest.mark.slow
def test_the_rank_that_keeps_the_store_may_be_the_one_that_dies(ranks: Ranks) -> None:
    ranks.add(0, BEFALL.format(function="_all_reduce", what="os._exit(3)"))
    ranks.add(1)
    ranks.start()
    status, line = ranks.ended(1)
    assert status == 1 and " failed (" in line and line.endswith(NO_STORE)


@pytest.mark.slow
def test_a_wrong_port_is_told(ranks: Ranks) -> None:
    ranks.add(1)
    ranks.start()
    status, line = ranks.ended(1)
    assert status == 1 and f"nobody answers at localhost:{ranks.port} within {TIMEOUT} s" in line


def launched(*arguments: str, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    script = str(Path(sys.executable).with_name("torchrun"))
    launcher = [script] if torchrun else [sys.executable, "-m", "torch.distributed.run"]
    return subprocess.run(
        [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "torch.distributed.run"])
def test_launchers_start_it(torchrun: bool) -> None:
    if torchrun and not Path(sys.executable).with_name("torchrun").exists():
        pytest.skip("torch is installed without its script")
    found = launched(
        *("--nproc_per_node", "3", "-m", "overflowstat", "check-distributed", "--backend", "gloo"), torchrun=torchrun
    )
    said = [line for line in found.stdout.splitlines() if line.startswith("[")]
    assert found.returncode == 0, found.stderr
    assert sorted(said) == [f"[{HOST}-{i}] is OK (global rank: {i}/3)" for i in range(3)]


@pytest.mark.slow
def test_ranks_that_a_launcher_ends_say_why(tmp_path: Path) -> None:
    script = tmp_path / "befallen.py"
    what = "os._exit(3) if os.environ['RANK'] == '1' else __import__('time').sleep(1000)"
    script.write_text(RANK.format(befall=BEFALL.format(function="_all_reduce", what=what)))
    found = launched("--nproc_per_node", "2", str(script), "--backend", "gloo")
    assert found.returncode == 1
    assert f"[{HOST}-0] FAILED (global rank: 0/2): all-reduce was ended from outside; no sign of life from rank 1" in (
        found.stdout
    ), found.stdout + found.stderr


class Node:
    """A host of its own, as far as the network is concerned, with one link to another one."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.link = f"{name}-l"

    def run(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    tag = os.getpid() % 100_000
    first, second = Node(f"os{tag}a", "10.77.0.1"), Node(f"os{tag}b", "10.77.0.2")
    ip = shutil.which("ip")
    if ip is None or subprocess.run([ip, "netns", "add", first.name], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces take iproute2 and root")
    try:
        subprocess.run([ip, "netns", "add", second.name], check=True)
        subprocess.run([ip, "link", "add", first.link, "type", "veth", "peer", "name", second.link], check=True)
        for node in (first, second):
            subprocess.run([ip, "link", "set", node.link, "netns", node.name], check=True)
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", node.link)
            node.run("ip", "link", "set", node.link, "up")
            node.run("ip", "link", "set", "lo", "up")
        yield first, second
    finally:
        for node in (first, second):
            subprocess.run([ip, "netns", "del", node.name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_two_nodes_and_the_link_between_them(nodes: tuple[Node, Node], is_cut: bool) -> None:
    first, second = nodes
    ranks = Ranks(2, host=first.address)
    cut = f"import subprocess, time; subprocess.run(['ip', 'link', 'set', '{second.link}', 'down']); time.sleep(1000)"
    befall = ["", BEFALL.format(function="_all_reduce", what=cut) if is_cut else ""]
    try:
        for rank, node in enumerate(nodes):
            within = ["ip", "netns", "exec", node.name]
            ranks.add(rank, befall[rank], within, GLOO_SOCKET_IFNAME=node.link, LOCAL_RANK="0")
        ranks.start()
        ended = [ranks.ended(rank) for rank in (1, 0)]
    finally:
        ranks.kill()
    if is_cut:
        assert [status for status, _ in ended] == [1, 1]
        assert "all-reduce did not end" in ended[0][1] and ended[0][1].endswith(NO_STORE)
        assert ended[1][1].endswith(f"no sign of life from rank 1 [{HOST}-0]")
    else:
        assert [line for _, line in ended] == [f"[{HOST}-0] is OK (global rank: {rank}/2)" for rank in (1, 0)]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_PORT is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "RANK is 'x', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "ranks count from 0"),
    ],
)
def test_without_a_launcher_it_says_how_to_start_it(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Launch.of(environment)


def test_who_is_behind_and_who_is_silent_is_told_apart() -> None:
    port = free_port()
    stores = [connect("localhost", port, "x", 10.0, is_host) for is_host in (True, False, False, False)]
    first = Presence(stores[0], stores[1], Member(0, "node", 0), 3)
    second = Presence(stores[2], stores[3], Member(1, "node", 1), 3)
    first.reach(4)
    second.reach(3)
    assert first.behind(3) == [2] and first.behind(4) == [1, 2] and first.wait_for_all(4, 0.1) == [1, 2]
    second.close()
    assert first.silent() == [1, 2]
    assert first.names([1, 2]) == "rank 1 [node-1], rank 2, which never started"
    first.close()


@pytest.mark.parametrize("size", range(1, 10))
def test_each_pair_meets_once_in_the_fewest_rounds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, int]] = []
    rounds: list[list[tuple[int, int]]] = []
    for rank in range(size):
        partners: list[int] = []
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, found=partners: found.append(peer))
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
        monkeypatch.setattr(communication, "_expect", lambda *_: None)
        communication._each_pair(Launch(rank, size, rank, "", 0, False, ""), torch.device("cpu"))
        pairs = [(rank, peer) for peer in partners[::2]]
        rounds.append(pairs)
        met += pairs
    expected = [(a, b) for a in range(size) for b in range(size) if a != b]
    assert sorted(met) == expected
    assert all(len(pairs) == size - 1 for pairs in rounds)
