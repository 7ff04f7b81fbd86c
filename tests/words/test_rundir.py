from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from other_users import ALICE, needs_root

from kvstore.errors import UsageError
from kvstore.rundir import UNIX_PATH_BYTES_MAX, private_dir, run_dir, socket_path


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("KVSTORE_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_argument_wins_over_the_environment(environment, tmp_path: Path) -> None:
    environment.setenv("KVSTORE_RUN_DIR", str(tmp_path / "environment"))
    assert run_dir(tmp_path / "argument") == tmp_path / "argument"
    assert not (tmp_path / "environment").exists()


def test_the_order_is_own_variable_then_xdg_then_tmp(environment, tmp_path: Path) -> None:
    environment.setattr("tempfile.tempdir", str(tmp_path))
    assert run_dir() == tmp_path / f"kvstore-{os.geteuid()}"
    (tmp_path / "xdg").mkdir()
    environment.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_dir() == tmp_path / "xdg" / "kvstore"
    environment.setenv("KVSTORE_RUN_DIR", str(tmp_path / "own"))
    assert run_dir() == tmp_path / "own"


def test_an_xdg_directory_that_is_not_there_is_passed_over(environment, tmp_path: Path) -> None:
    environment.setattr("tempfile.tempdir", str(tmp_path))
    environment.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert run_dir() == tmp_path / f"kvstore-{os.geteuid()}"


def test_it_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    made = run_dir(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    assert run_dir(tmp_path / "a" / "b") == made


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755, 0o701])
def test_one_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=r"run_dir=.*0700"):
        run_dir(tmp_path)


def test_a_planted_link_is_refused(environment, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    environment.setenv("KVSTORE_RUN_DIR", str(tmp_path / "link"))
    with pytest.raises(UsageError, match=r"KVSTORE_RUN_DIR=.*not a link"):
        run_dir()


def test_that_of_another_user_is_refused(environment, tmp_path: Path) -> None:
    environment.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="must belong to user 12345"):
        private_dir(tmp_path)


def test_a_file_or_an_impossible_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="run_dir="):
            run_dir(path)


def test_a_socket_path_may_be_as_long_as_the_kernel_takes_and_no_longer() -> None:
    fits = Path("/" + "x" * (UNIX_PATH_BYTES_MAX - 1))
    assert socket_path(fits) == fits
    with pytest.raises(UsageError, match=f"108 bytes, a Unix socket at most {UNIX_PATH_BYTES_MAX}"):
        socket_path(Path(f"{fits}x"))


def test_where_another_user_was_first_all_processes_of_this_one_find_another_directory(
    environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setattr("tempfile.tempdir", str(tmp_path))
    taken = tmp_path / f"kvstore-{os.geteuid()}"
    taken.symlink_to("/nowhere")
    environment.setattr("kvstore.rundir._is_anothers", lambda path: path.is_symlink())
    found = run_dir()
    assert found.parent == tmp_path
    assert found.name.startswith(f"{taken.name}-")
    assert found.stat().st_mode & 0o777 == 0o700
    with ThreadPoolExecutor(4) as pool:
        assert {pool.submit(run_dir).result() for _ in range(8)} == {found}
    (tmp_path / f"{taken.name}-0planted").symlink_to("/nowhere")
    assert run_dir() == found
    assert f"{taken} belongs to user" in caplog.text
    taken.unlink()
    assert run_dir() == found  # who gives the name back parts none of this user's processes


@needs_root
def test_a_directory_of_another_user_stops_nobody(environment, tmp_path: Path) -> None:
    environment.setattr("tempfile.tempdir", str(tmp_path))
    taken = tmp_path / f"kvstore-{os.geteuid()}"
    taken.mkdir()
    os.chown(taken, ALICE, ALICE)
    assert run_dir() == run_dir() != taken


def test_a_directory_of_this_user_that_is_open_to_others_is_still_refused(
    environment, tmp_path: Path
) -> None:
    environment.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"kvstore-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"kvstore-{os.geteuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="0700"):
        run_dir()
