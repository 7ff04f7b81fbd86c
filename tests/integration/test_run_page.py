"""docs/run.md does what it says: its commands run, its sums are right, its promises hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import free_port, wait_until
from stores import PATIENT

from connector import KVGeometry, TpKVTopology
from connector.layout.geometry import default_block_tokens
from connector.metrics import METRICS
from kvstore import Client, StreamSecurity
from kvstore.index.embedded_redis.server import find_server
from kvstore.node.metrics import FAMILIES, PREFIX
from kvstore.nodedir import NodeDir

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run.md").read_text()
GIB = 1 << 30
SOON_S = 60.0
ELSEWHERE = {
    "pip install .": "scripts/lib/wheel_check.py",
    "kvstore run --size 64GiB -- vllm serve MODEL": "tests/cli/test_run.py",
    "kvstore up --size 64GiB": "tests/cli/test_up.py",
    "promtool test rules deploy/prometheus/alerts_test.yml": "tests/integration/test_dashboard.py",
    "systemctl restart kvstore-node": "tests/repository/test_systemd.py",  # systemd-analyze
}
"""Commands of the page that do not run here, and the file that checks each."""
OF_A_CLUSTER = {
    "redis-server --port 6379 --save '' --maxmemory 1gb --maxmemory-policy allkeys-lru "
    "--protected-mode no",
    "(umask 077; openssl rand -hex 32 > /etc/kvstore/secret)",
    "export KVSTORE_URL=redis://HOST:6379",
    "export KVSTORE_SECRET_FILE=/etc/kvstore/secret",
    "kvstore node --size 64GiB --listen :7600 --metrics :9400 --keep",
}
"""Those that `Cluster` runs."""
ASKED = {
    "kvstore doctor": (0, "nodes"),
    "kvstore stat": (0, "node"),
    "kvstore top": (0, "node"),
    "kvstore acl --key-prefix kv:alice": (0, "ACL SETUSER"),
    "kvstore acl --key-prefix kv:alice --keep-passwords": (0, "ACL SETUSER"),
    "curl -s http://localhost:9400/ready": (0, "yes"),
    "curl -s http://localhost:9400/metrics": (0, "# TYPE kvstore_node_ready gauge"),
    "kvstore doctor --json": (0, '"level"'),
    "kvstore config": (0, "url"),
    "kvstore explain --tokens prompt.json": (0, "0 of 512 tokens hit"),
    "kvstore explain --key greeting": (0, "greeting"),
    "kvstore node --clean": (0, ""),
}
"""The exit code of each, and what it says."""
ROTATION = re.compile(r"^ {8}(printf .+ && mv secret\.tmp secret)$", re.MULTILINE)
MODEL = re.compile(
    r"^\| (.+?) \| (\d+) \| (\d+|MLA) \| ([\d+ ]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE
)


def commands() -> list[str]:
    return re.findall(r"^(?: {4}| {8})(\S.*)$", PAGE, re.MULTILINE)


def test_each_command_of_the_page_runs_here_or_is_checked_elsewhere() -> None:
    shown = set(commands()) - set(ROTATION.findall(PAGE))
    assert shown == ELSEWHERE.keys() | OF_A_CLUSTER | ASKED.keys()
    assert all((ROOT / checked).is_file() for checked in ELSEWHERE.values())


# --- its sums ------------------------------------------------------------


def geometry(layers: str, heads: str, size: str) -> KVGeometry:
    """The store's own arithmetic, of 16-bit values."""
    mla = heads == "MLA"
    channels = sum(map(int, size.split(" + "))) if mla else 2 * int(size)
    return KVGeometry(
        layers=int(layers),
        heads=1 if mla else int(heads),
        channel_bytes=channels * 2,
        engine_block_tokens=16,
    )


def test_the_table_of_models_is_what_the_store_computes() -> None:
    rows = MODEL.findall(PAGE)
    assert len(rows) == 10
    for name, layers, heads, size, shown, tokens in rows:
        token_bytes = geometry(layers, heads, size).payload_bytes(1)
        assert int(shown.replace(",", "")) == token_bytes, name
        assert int(tokens.replace(",", "")) == 64 * GIB // token_bytes, name


def test_the_size_of_redis_is_that_of_its_blocks() -> None:
    llama = geometry("32", "8", "128")
    tokens = default_block_tokens([(llama, TpKVTopology.of(), None)])
    assert f"blocks of {tokens} tokens with Llama 3.1 8B" in PAGE
    blocks = 10 * 64 * GIB // llama.payload_bytes(tokens)
    assert f"{blocks:,} blocks: {blocks * 160 / 1e6:.0f} MB" in PAGE


def queries() -> list[str]:
    return re.findall(r"```promql\n(.+)\n```", PAGE)


def test_every_metric_of_the_page_is_exported() -> None:
    names = set(re.findall(r"(?:vllm:)?kvstore_[a-z_]+", " ".join(queries())))
    assert len(names) > 4
    nodes = {f"{PREFIX}{one.name}{'_total' if one.counter else ''}" for one in FAMILIES}
    engines = {f"vllm:{metric.name}_total" for metric in METRICS}
    assert not names - nodes - engines


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")
def test_prometheus_takes_every_query_of_the_page(tmp_path: Path) -> None:
    rules = [{"record": f"kv:{i}", "expr": query} for i, query in enumerate(queries())]
    assert len(rules) >= 4
    file = tmp_path / "rules.json"  # which is YAML
    file.write_text(json.dumps({"groups": [{"name": "page", "rules": rules}]}))
    ran = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


# --- its commands and promises, on two hosts that share nothing but Redis --------------------


class Host:
    """A host: its run directory, its file with the secret and its node, by the page's commands."""

    def __init__(self, directory: Path, port: int, secret: Path) -> None:
        directory.mkdir()
        self.directory, self.port, self.metrics = directory, port, free_port()
        self.secret = directory / "secret"
        shutil.copy(secret, self.secret)
        (directory / "prompt.json").write_text(json.dumps(list(range(512))))
        self.run_dir = directory / "run"
        self.start()

    def adapted(self, command: str) -> str:
        """The page's words, with places and sizes of this machine."""
        for there, here in {
            "redis://HOST:6379": f"redis://127.0.0.1:{self.port}",
            "/etc/kvstore/secret": str(self.secret),
            "--size 64GiB": "--size 64MiB",
            "--listen :7600": "--listen 127.0.0.1:0",
            "9400": str(self.metrics),
        }.items():
            command = command.replace(there, here)
        return command

    def popen(self, *lines: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        environment |= {
            "KVSTORE_RUN_DIR": str(self.run_dir),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        words = "\n".join(self.adapted(line) for line in lines)
        return subprocess.Popen(
            ["bash", "-c", words],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def say(self, command: str) -> tuple[int, str]:
        exports = [line for line in commands() if line.startswith("export ")]
        process = self.popen(*exports, command)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def start(self) -> None:
        block = re.search(r"(?: {8}export .+\n)+ {8}(kvstore node .+)\n", PAGE)
        assert block is not None
        lines = [line.strip() for line in block[0].splitlines()]
        self.process = self.popen(*lines[:-1], f"exec {lines[-1]}")
        wait_until(self.ready, "a node", SOON_S)

    def ready(self) -> bool:
        directory = NodeDir(self.run_dir, "node")
        word = directory.announcement()
        return word is not None and word.pid == self.process.pid and directory.socket.exists()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)

    def client(self) -> Client:
        return Client(
            f"redis://127.0.0.1:{self.port}",
            run_dir=self.run_dir,
            limits=PATIENT,
            security=StreamSecurity(secret_file=self.secret),
        )


class Reader:
    """Reads over and over until told to stop, and keeps what was wrong or missing."""

    def __init__(self, host: Host, values: dict[str, bytes]) -> None:
        self._host, self._values = host, values
        self._ended = threading.Event()
        self.failed = True
        self.hits = self.misses = self.wrong = 0
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        with self._host.client() as client:
            while not self._ended.is_set():
                read = client.get_many(list(self._values))
                self.hits += len(read) - read.count(None)
                self.misses += read.count(None)
                expected = self._values.values()
                self.wrong += sum(a not in (None, b) for a, b in zip(read, expected, strict=True))
                self._ended.wait(0.01)
        self.failed = False

    def all_hit(self) -> bool:
        with self._host.client() as client:
            return client.get_many(list(self._values)) == list(self._values.values())

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(60)
        assert not self.failed, "a call raised"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    (line,) = [line for line in commands() if line.startswith("redis-server")]
    (secret,) = [line for line in commands() if "openssl" in line]
    port = free_port()
    words = line.replace("redis-server", str(find_server().path)).replace("6379", str(port))
    made: list[Host] = []
    redis = subprocess.Popen(["bash", "-c", f"exec {words}"], stdout=subprocess.DEVNULL)
    try:
        file = tmp_path / "secret"
        subprocess.run(["bash", "-c", secret.replace("/etc/kvstore/secret", str(file))], check=True)
        assert file.stat().st_mode & 0o777 == 0o600
        made.extend(Host(tmp_path / name, port, file) for name in "ab")
        yield made[0], made[1]
    finally:
        for host in made:
            host.stop()
            host.say("kvstore node --clean")
        redis.terminate()
        redis.wait(20)


def values(of: str) -> dict[str, bytes]:
    return {f"{of}{i}": f"{of}{i}".encode() * 3000 for i in range(20)}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_commands_of_the_page_answer(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with here.client() as client, there.client() as other:
        assert client.put("greeting", b"hello")
        wait_until(lambda: other.get("greeting") == b"hello", "the other host reads", SOON_S)
    for command, (code, said) in ASKED.items():
        got = here.say(command)
        assert got[0] == code, (command, got)
        assert said in got[1], (command, got)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nodes_restarted_one_after_the_other_have_every_block_again(
    hosts: tuple[Host, Host],
) -> None:
    """No read is wrong meanwhile, and no call fails: what is away is a miss."""
    saved: dict[str, bytes] = {}
    for host, of in zip(hosts, "ab", strict=True):
        with host.client() as client:
            assert all(client.put_many(values(of)))
        saved |= values(of)
    with Reader(hosts[0], saved) as one, Reader(hosts[1], saved) as other:
        for host in hosts:
            host.stop()
            host.start()
            for reader in (one, other):
                wait_until(reader.all_hit, "all are found again", SOON_S)
    assert one.wrong == other.wrong == 0
    assert one.misses
    assert other.hits


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_secret_is_rotated_while_another_host_reads(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with here.client() as client:
        assert all(client.put_many(values("a")))
    old, new = here.secret.read_text().strip(), 32 * "4e"
    steps = ROTATION.findall(PAGE)
    assert len(steps) == 3
    with Reader(there, values("a")) as reader:
        wait_until(reader.all_hit, "all blocks are found", SOON_S)
        before = reader.misses
        for step in steps:
            for host in hosts:
                ran = host.say(step.replace("OLD", old).replace("NEW", new))
                assert ran[0] == 0, ran
            until = time.monotonic() + 3.0  # as long as the page says
            while time.monotonic() < until:  # clients that begin now: connections are new
                assert reader.all_hit(), step
    assert (reader.misses, reader.wrong) == (before, 0)
    there.secret.write_text(old)
    with there.client() as late:
        assert late.get("a0") is None, "the old secret is out"
        assert late.explain_key("a0").first_missing.reason.value == "unreadable-secret"  # type: ignore[union-attr]
