"""`kvstore config`, and `kvstore node --config FILE`."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from places import COMMAND, REPOSITORY, TIMEOUT_S, Place, clean_env

from kvstore import Client, PutStatus

FILE = """
[limits]
clients = 1
[security]
secret_file = "{secret}"
[node]
name = "of-the-file"
size = "4MiB"
keep = false
[connector]
tp_sizes = [1, 2]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.write_text("hunter2-hunter2-hunter2")
    secret.chmod(0o600)
    path = tmp_path / "kv.toml"
    path.write_text(FILE.format(secret=secret))
    return path


def kvstore(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *args],
        cwd=REPOSITORY,
        env=clean_env(**env),
        capture_output=True,
        timeout=TIMEOUT_S,
    )


def test_it_prints_what_is_in_force_as_toml_and_where_it_comes_from(path) -> None:
    ran = kvstore("config", "--config", str(path))
    assert ran.returncode == 0
    said = ran.stdout.decode()
    for line in (
        f"# {path} (--config)",
        "clients = 1  # file",
        "pins_per_client = 4096  # default",
        'size = "4MiB"  # file',
        "keep = false  # file",
        "# url: default",
        "tp_sizes = [1, 2]",
    ):
        assert line in said.splitlines(), line
    assert "hunter2" not in said
    read = tomllib.loads(said)
    assert read["limits"]["clients"] == 1
    assert read["node"]["name"] == "of-the-file"


def test_a_variable_that_wins_is_named_and_its_password_is_not_shown() -> None:
    url = "redis://u:hunter2@127.0.0.1:1/0"
    ran = kvstore("config", KVSTORE_URL=url, KVSTORE_SECRET="hunter2-hunter2-hunter2")
    said = ran.stdout.decode()
    assert 'url = "127.0.0.1:1"  # KVSTORE_URL' in said
    assert "# secret_file: KVSTORE_SECRET" in said
    assert "hunter2" not in said


def test_a_password_in_what_engines_read_is_not_shown(path) -> None:
    url = "redis://u:hunter2@127.0.0.1:1/0"
    extra = f'kv_connector_extra_config = {{ connectors = [{{ url = "{url}" }}] }}'
    path.write_text(f'[connector]\nurl = "{url}"\n[transfer]\n{extra}\n')
    said = kvstore("config", "--config", str(path)).stdout.decode()
    assert 'url = "redis://127.0.0.1:1"' in said
    assert "hunter2" not in said
    assert tomllib.loads(said)["transfer"]


def test_a_wrong_name_is_wrong_use(path) -> None:
    path.write_text("[node]\nsise = '4MiB'\n")
    for command in (("config",), ("node",)):
        ran = kvstore(*command, "--config", str(path))
        assert ran.returncode == 2
        assert b"[node]='sise': unknown: did you mean size?" in ran.stderr
    path.write_text("[node]\nsize = 'big'\n")
    ran = kvstore("node", "--config", str(path))
    assert ran.returncode == 2
    assert b"node.size='big': must be a size" in ran.stderr


def test_a_node_is_what_its_file_says_and_options_win(place: Place, path, redis_server) -> None:
    node = place.start("node", "--config", str(path), "--url", redis_server.url)
    assert "kvstore node of-the-file: ready, 4 MiB" in node.wait_for("ready")
    with (
        Client(redis_server.url, run_dir=place.run_dir) as one,
        Client(redis_server.url, run_dir=place.run_dir) as two,
    ):
        assert one.put("key", b"value").status is PutStatus.STORED
        assert "at most 1" in two.put("other", b"value").reason
    other = place.start("node", "--config", str(path), "--url", redis_server.url, "--name", "named")
    assert "kvstore node named: ready, 4 MiB" in other.wait_for("ready")
