"""What several tests, or several processes of one run, need compiled is compiled once."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

KEPT = Path(__file__).parent.parent / "build" / "for_tests"  # from run to run


def compile_once(
    command: Sequence[str],
    name: str,
    sources: Iterable[Path],
    folder: Path = KEPT,
    identity: Sequence[str] | None = None,
) -> Path:
    """The file `name` that the command makes with `-o`, beside `log`, which holds what the compiler said.

    Run only where `folder` has no result of this command, this compiler and the bytes of these sources. Of processes
    that want the same at once one compiles and the others wait for it. Raises with the compiler's output.
    `identity` takes the command's place where that names folders of which only the content counts.
    """
    digest = hashlib.sha256("\0".join([*(command if identity is None else identity), name]).encode())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout)
    for path in sorted(sources):
        digest.update(path.read_bytes())
    result = folder / f"{name}-{digest.hexdigest()[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    with Path(f"{result}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                # A folder without headers, where nvcc would look for its own first.
                made = Path(scratch) / "made"
                made.mkdir()
                done = subprocess.run([*command, "-o", name], capture_output=True, text=True, cwd=made)
                assert done.returncode == 0, done.stdout + done.stderr
                (made / "log").write_text(done.stdout + done.stderr)
                made.rename(result)
    return result / name
