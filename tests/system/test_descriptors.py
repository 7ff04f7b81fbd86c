"""The limit of open files: raised in processes of ours, left as it is in a user's."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from kvstore.system.descriptors import OPEN_FILES_MAX, share

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limited(limits: tuple[int, int], program: str, *words: str) -> str:
    """What a program says that starts with that soft and hard limit."""
    start = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
    command = [sys.executable, "-c", start.format(limits=limits) + program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RAISED = """
from kvstore.system import descriptors
descriptors.OPEN_FILES_MAX = int(sys.argv[1])
descriptors.raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [
        ((256, 512), 1 << 16, (512, 512)),
        ((256, 512), 300, (300, 512)),
        ((256, 512), 100, (256, 512)),
        ((512, 512), 1 << 16, (512, 512)),
    ],
    ids=["to the hard one", "to what we ask for", "never lowered", "nothing to raise"],
)
def test_the_soft_limit_is_raised_and_never_lowered(
    limits: tuple[int, int], most: int, raised: tuple[int, int]
) -> None:
    assert limited(limits, RAISED, str(most)) == str(raised)


def test_no_limit_counts_as_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (UNLIMITED, UNLIMITED))
    assert share(1 << 30, 8) == OPEN_FILES_MAX // 8


def test_a_share_is_as_much_as_wanted_or_a_part_of_what_there_is() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert share(20, 8) == 20
    assert share(100, 8) == 32
    assert share(100, 1000) == 1, "never none"


PROGRAM = """
from pathlib import Path
from kvstore import Client
before = resource.getrlimit(resource.RLIMIT_NOFILE)
client = Client(run_dir=sys.argv[1], node_size_bytes=8 << 20)
assert client.put("k", b"v"), "it is saved"
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before == (300, 500)
found = []
for proc in Path("/proc").glob("[0-9]*"):
    try:
        words = (proc / "cmdline").read_bytes().split(b"\\0")
        limits = (proc / "limits").read_text()
    except OSError:
        continue
    if b"kvstore.cli" in words and b"node" in words and sys.argv[1].encode() in words:
        found.append([line.split()[3] for line in limits.splitlines() if "open files" in line][0])
print(found)
client.close()
"""


def test_an_embedded_node_raises_its_own_limit_and_not_its_users() -> None:
    with tempfile.TemporaryDirectory(prefix="kvn-", ignore_cleanup_errors=True) as run_dir:
        said = limited((300, 500), PROGRAM, run_dir)
    assert said == "['500']"
