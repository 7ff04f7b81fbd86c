"""`kvstore node --disk`: real processes that start, refuse, are looked at and cleaned."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import Client
from kvstore.cli import _parse
from kvstore.cli.commands.node import disk_options
from kvstore.core.disk.base import DISK_PAGE
from kvstore.segment.disk.device import superblock_of
from kvstore.segment.disk.file import FILE_NAME, open_file
from kvstore.segment.disk.format import pack_superblock

if TYPE_CHECKING:
    from places import Place

MIB = 1 << 20
SIZE = ("--disk-size", "16MiB")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory on the file system of the tests, which may be none that is allowed unforced."""
    made = tmp_path / "disk"
    made.mkdir()
    return made


def on(disk: Path, *sizes: str) -> tuple[str, ...]:
    return ("--disk", str(disk), *(sizes or SIZE), "--disk-force")


def refused(place: Place, *options: str) -> str:
    """What a node says that does not start."""
    ended = place.kv("node", "--size", "4MiB", "--name", "refused", *options)
    said = ended.stderr.decode()
    assert ended.returncode not in (0, None), said
    assert "Traceback" not in said
    return said


def stats(place: Place, name: str = "node") -> dict[str, int]:
    told = place.here("stat", "--node", name, "--json")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


# --- where it does not start --------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_refused(place: Place, disk: Path) -> None:
    said = refused(place, *on(disk / "gone"))
    assert f"{disk / 'gone'}'" in said
    assert "must be a directory that is there: make it" in said


def test_shared_memory_is_refused_with_the_option_that_allows_it(place: Place) -> None:
    said = refused(place, "--disk", "/dev/shm", *SIZE)
    assert "disk='/dev/shm': is on tmpfs; must be on ext4 or xfs" in said
    assert "--disk-force" in said
    assert not Path("/dev/shm", FILE_NAME).exists()


def test_a_size_that_leaves_the_file_system_too_little_is_refused_with_one_that_does_not(
    place: Place, disk: Path
) -> None:
    room = os.statvfs(disk)
    asked = room.f_bavail * room.f_frsize
    said = refused(place, "--size", "512MiB", *on(disk, "--disk-size", str(asked)))
    assert "would leave under 5% of its file system" in said
    assert "use a disk size of at most " in said
    assert not list(disk.iterdir())


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        (("--disk-size", "1MiB"), ["disk_size=1048576", "at least 8388608 (8MiB)"]),
        (("--disk-size", "8TiB"), ["size_bytes=4194304", "(--size)"]),
        (("--disk-size", "x"), ["--disk-size", "'x'"]),
        (("--disk-size", "9MiB", "--disk-size", "8MiB"), ["'9437184', '8388608'", "one for each"]),
        ((*SIZE, "--disk-writes-per-day", "-1"), ["disk_writes_per_day=-1.0", "at least 0"]),
        ((*SIZE, "--disk-write", "never"), ["'never'", "through"]),
    ],
)
def test_wrong_numbers_are_refused_by_name_with_their_limit(
    place: Place, disk: Path, sizes: tuple[str, ...], texts: list[str]
) -> None:
    said = refused(place, *on(disk, *sizes))
    assert all(text in said for text in texts), said
    assert not list(disk.iterdir())


def test_a_directory_without_a_size_and_the_same_one_twice_are_refused(
    place: Place, disk: Path
) -> None:
    assert "disk_size=[]: must be one size" in refused(place, "--disk", str(disk))
    assert "different directories" in refused(place, *on(disk), "--disk", f"{disk}/.")


def test_a_disk_that_another_node_uses_is_refused_and_not_cleaned(place: Place, disk: Path) -> None:
    place.node(*on(disk))
    said = refused(place, *on(disk))
    assert "is in use by another process: one node a disk, so name another" in said
    cleaned = place.here("node", "--clean", "--disk", str(disk))
    assert cleaned.returncode != 0
    assert b"is in use by another process" in cleaned.stderr
    assert (disk / FILE_NAME).exists()


def test_another_programs_file_is_refused_and_not_cleaned(place: Place, disk: Path) -> None:
    (disk / FILE_NAME).write_bytes(content := os.urandom(2 * DISK_PAGE))
    assert "is no disk of kvstore's: move it away" in refused(place, *on(disk))
    cleaned = place.here("node", "--clean", "--disk", str(disk))
    assert cleaned.returncode != 0
    assert b"is no disk of kvstore's" in cleaned.stderr
    assert (disk / FILE_NAME).read_bytes() == content


def test_a_disk_of_another_version_is_refused_until_it_is_made_anew(
    place: Place, disk: Path
) -> None:
    place.node(*on(disk)).end(signal.SIGTERM)
    with (disk / FILE_NAME).open("r+b") as file:
        for page in range(2):
            file.seek(page * DISK_PAGE + 8)
            file.write(b"\x63")
    said = refused(place, *on(disk))
    assert "has a format of another version" in said
    assert "`kvstore node --clean --disk` makes it anew" in said
    cleaned = place.here("node", "--clean", "--disk", str(disk))
    assert (cleaned.returncode, b"freed" in cleaned.stdout) == (0, True)
    assert not list(disk.iterdir())
    place.node(*on(disk))
    assert stats(place)["disk_devices"] == 1


# --- where it does ------------------------------------------------------------------------------


def test_a_disk_that_was_closed_for_good_is_left_out_and_everybody_says_so(
    place: Place, disk: Path
) -> None:
    place.node(*on(disk)).end(signal.SIGTERM)
    file = open_file(disk, 16 * MIB, forced=True)
    found = superblock_of(file)
    assert found is not None
    file.close()
    page = pack_superblock(found._replace(writes=found.writes + 1, closed_s=1))
    with (disk / FILE_NAME).open("r+b") as raw:
        raw.write(page * 2)
    node = place.start("node", "--size", "16MiB", *on(disk))
    node.wait_for(": ready")
    assert "was closed for good, since a sync failed" in node.output
    assert "`kvstore node --clean --disk` makes it anew" in node.output
    assert stats(place)["disk_closed"] == 1
    said = "1 of its disks does not work"
    with Client(run_dir=place.run_dir) as client:
        health = client.health()
        assert health
        assert dict(health.disks) == {"node": f"{said}: its log says why"}
        assert said in str(health)
    assert said.encode() in place.here("stat").stdout
    rows = json.loads(place.here("doctor", "--json").stdout)["checks"]
    (row,) = (row for row in rows if said in row["found"])
    assert row["level"] == "warn"
    assert "docs/disk.md" in row["do"]


def test_stat_says_what_was_evicted_unwritten_and_why(place: Place, disk: Path) -> None:
    place.node(*on(disk))
    with Client(run_dir=place.run_dir) as client:
        assert all(client.put_many({f"{i}": bytes(8 << 10) for i in range(3000)}))
    skipped = stats(place)["disk_skipped_small"]
    assert skipped
    assert f", evicted unwritten: {skipped} small\n" in place.here("stat").stdout.decode()


def test_the_operators_file_says_where_disks_are_and_an_option_wins(
    place: Place, disk: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    file = tmp_path / "kvstore.toml"
    file.write_text(
        f'[node]\nsize = "16MiB"\ndisk = ["{disk}", "{other}"]\ndisk_size = ["16MiB"]\n'
        'disk_write = "through"\ndisk_writes_per_day = 2\ndisk_force = true\n'
    )
    place.start("node", "--config", str(file)).wait_for(": ready")
    assert stats(place)["disk_devices"] == 2
    place.start("node", "--config", str(file), "--name", "one", *on(tmp_path)).wait_for(": ready")
    assert stats(place, "one")["disk_devices"] == 1


def test_a_size_grows_and_shrinks_at_a_restart(place: Place, disk: Path) -> None:
    for size in (16 * MIB, 48 * MIB, 24 * MIB):
        place.node(*on(disk, "--disk-size", str(size))).end(signal.SIGTERM)
        taken = (disk / FILE_NAME).stat().st_size
        assert size * 0.99 < taken < size


def test_clean_says_what_there_is_and_leaves_the_rest_of_the_run_directory(
    place: Place, disk: Path
) -> None:
    node = place.node("--keep", *on(disk))
    node.end(signal.SIGTERM)
    assert len(place.segments("node")) == 2
    for text in (b" MiB freed", b": there is none"):
        cleaned = place.here("node", "--clean", "--disk", str(disk))
        assert cleaned.returncode == 0
        assert text in cleaned.stdout
    assert len(place.segments("node")) == 2


def test_up_has_a_node_with_disks_and_refuses_one_disk_for_several(
    place: Place, disk: Path
) -> None:
    up = place.start("up", "--size", "16MiB", *on(disk))
    up.wait_for("Ctrl-C ends it.")
    assert stats(place, "node-0")["disk_devices"] == 1
    ended = place.here("up", "--nodes", "2", *on(disk))
    assert ended.returncode != 0
    assert b"is for one node, not for 2" in ended.stderr


@pytest.mark.parametrize("command", ["up", "run"])
def test_options_for_disks_reach_a_node_that_is_started_as_they_were_given(command: str) -> None:
    words = ["--disk=/a b", "--disk=/c", "--disk-size=8MiB", "--disk-size=9MiB"]
    words += ["--disk-write=through", "--disk-writes-per-day=1.5", "--disk-force"]
    given = disk_options(_parse([command, *words]))
    node = _parse(["node", *given])
    assert (node.disk, node.disk_size) == (["/a b", "/c"], [8 * MIB, 9 * MIB])
    assert (node.disk_write, node.disk_writes_per_day, node.disk_force) == ("through", 1.5, True)
    assert disk_options(_parse([command])) == []
