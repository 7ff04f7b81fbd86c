"""In a container with a small /dev/shm, as Docker's default of 64 MiB: a mount namespace here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import NoSpaceError
from kvstore.client.nodes.saving import embedded_node
from kvstore.client.nodes.saving.embedded_node import fitting_bytes
from kvstore.segment.shm import files_bytes

MIB = 1 << 20
CODE = """
import logging, sys, time
from pathlib import Path
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
from kvstore import Client, KVStoreError, Limits
from kvstore.spi import BlockSession, NodeUnavailableError
patient = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
with Client(run_dir=Path(sys.argv[1]), limits=patient) as client:
    try:
        results = client.put_many({f"k{i}": bytes(1 << 20) for i in range(10)})
        print("stored", sum(map(bool, results)), "of", len(results))
        print("got", sum(client.get(f"k{i}") is not None for i in range(10)))
        print("capacity", int(client.stats()["node"]["capacity_bytes"]) >> 20)
    except KVStoreError as e:
        print(type(e).__name__, e)
        session = client.session
        try:
            session.reserve([bytes(32)], 1000, 1)
        except NodeUnavailableError as e:
            print("reserve:", e)
"""


def in_a_namespace_with(shm_mib: int, run_dir: Path) -> str:
    """What CODE says where /dev/shm is a tmpfs of this size."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace may not be made here (unshare -rm)")
    mount = f"mount -t tmpfs -o size={shm_mib}m tmpfs /dev/shm"
    ran = subprocess.run(
        [
            *(unshare, "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"),
            *(sys.executable, "-c", CODE, str(run_dir)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(autouse=True)
def no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_URL", raising=False)


def test_in_64_mib_a_smaller_node_is_started_with_a_warning(tmp_path: Path) -> None:
    said = in_a_namespace_with(64, tmp_path / "run")
    assert "stored 10 of 10" in said
    assert "got 10" in said
    (warning,) = [line for line in said.splitlines() if line.startswith("WARNING")]
    assert "/dev/shm has room for a node of 4" in warning
    assert "not of 512 MiB" in warning
    assert "--shm-size" in warning
    (capacity,) = [line for line in said.splitlines() if line.startswith("capacity")]
    assert 40 <= int(capacity.split()[1]) <= 48


def test_where_nothing_useful_fits_a_put_raises_and_says_what_to_do(tmp_path: Path) -> None:
    said = in_a_namespace_with(20, tmp_path / "run")
    assert "NoSpaceError /dev/shm" in said
    assert "--shm-size" in said
    assert "stored" not in said
    assert "reserve: /dev/shm" in said, "a connector's save fails as without a node"


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(embedded_node, "free_bytes", lambda where: free_bytes)


@pytest.mark.parametrize("room", [10 * MIB, 46 * MIB, 100 * MIB + 7, 511 * MIB, 40 << 30])
def test_what_is_said_to_fit_does_and_is_most_of_the_room(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    free(monkeypatch, room)
    size = fitting_bytes(Path("/dev/shm"), 1 << 40)
    assert files_bytes(size) <= room
    assert size > 0.85 * room


def test_room_that_is_reserved_already_is_told_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, -15 * MIB)
    with pytest.raises(NoSpaceError, match="/dev/shm has 0 MiB to give"):
        fitting_bytes(Path("/dev/shm"), 512 * MIB)


def test_what_fits_is_left_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1 << 30)
    assert fitting_bytes(Path("/dev/shm"), 512 * MIB) == 512 * MIB
    assert fitting_bytes(Path("/dev/shm"), 5 * MIB) == 5 * MIB, "a small one is its user's wish"


def test_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2 * MIB)
    with pytest.raises(NoSpaceError, match="shm-size"):
        fitting_bytes(Path("/dev/shm"), 512 * MIB)
