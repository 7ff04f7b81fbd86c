"""The pods of deploy/kubernetes on hosts of their own: real nodes and clients, a kubelet by hand.

What is not here is Kubernetes itself, images, and engines with GPUs; `kvstore.Client` stands where
a connector would be. The size of a node is less than the manifest's.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cluster
import pytest
import yaml
from pods import Pod, Started, mount_shm
from redis_servers import wait_until

from kvstore.testing.hosts import SWITCH, Hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

MANIFESTS = Path(__file__).parents[2] / "deploy/kubernetes"
NODE_SIZE = "48MiB"
SHM_SIZE = "160m"
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 30.0
"""The second is what a kubelet gives a pod to end."""
VALUES = 20

PROGRAM = "sys.exit(main(args))"
# An engine's place in the store, which does what it is told, a line each.
ENGINE = f"""
client = Client(limits=PATIENT)
names = [f"value {{i}}" for i in range({VALUES})]
def content(i):
    return f"{{i}} ".encode() * 20_000
for line in sys.stdin:
    if line.strip() == "put":
        print(sum(bool(client.put(n, content(i))) for i, n in enumerate(names)), flush=True)
    else:
        found = client.get_many(names)
        assert all(v in (None, content(i)) for i, v in enumerate(found))
        came = {{way: counts for way, counts in client.stats()["transports"].items() if counts}}
        print(json.dumps([sum(v is not None for v in found), came]), flush=True)
"""


def template(manifest: str) -> dict[str, Any]:
    """The pod of the first workload in the manifest, with a node that fits in here."""
    text = (MANIFESTS / manifest).read_text()
    workload = next(iter(yaml.safe_load_all(text)))
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["args"] = [
            f"--size={NODE_SIZE}" if word.startswith("--size=") else word
            for word in container["args"]
        ]
    return spec


class Engine:
    """A pod's engine, a client of the store."""

    def __init__(self, started: Started) -> None:
        self._process = started.process

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def put(self) -> int:
        return int(self._ask("put"))

    def get(self) -> int:
        """How many of the values are hits."""
        return int(json.loads(self._ask("get"))[0])

    def ways(self) -> dict[str, int]:
        """How often what it has got came by which way."""
        found: dict[str, int] = json.loads(self._ask("get"))[1]
        return found


class Kubernetes:
    """Hosts a and b, and Redis where the cluster's service would be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hosts = Hosts(2)
        self.places = cluster.Places("cluster", root)
        self.mounted: list[Path] = []
        self.lives = 0
        self.hosts.start()
        try:
            self.redis = cluster.start_redis(self.hosts, self.places)
        except BaseException:
            self.hosts.close()
            raise

    def pod(self, host: str, spec: dict[str, Any], *, shm: Path | None = None) -> Pod:
        """The next life of a pod on that host; its memory is the host's, or `shm`."""
        self.lives += 1
        return Pod(
            spec,
            f"pod-{self.lives}",
            {"shm": shm or self.shm(host)},
            {
                "POD_IP": self.hosts.address(host),
                "KVSTORE_SECRET": self.places.secret.read_text(),
                "redis://redis:6379": f"redis://{self.hosts.address(SWITCH)}:{cluster.REDIS_PORT}",
            },
            self.hosts.command(host, []),
        )

    def shm(self, name: str, *, group: int | None = None) -> Path:
        path = self.root / "shm" / name
        if path not in self.mounted:
            mount_shm(path, SHM_SIZE, group=group)
            self.mounted.append(path)
        return path

    @contextmanager
    def node(self, pod: Pod, log: Path) -> Iterator[Started]:
        with log.open("ab") as out, pod.running("node", PROGRAM, stdout=out, stderr=out) as started:
            directory = pod.volumes["shm"] / "kvstore"
            wait_until(
                lambda: "ready" in log.read_text() or started.process.poll() is not None,
                "the node is ready",
                START_TIMEOUT_S,
            )
            assert started.process.poll() is None, log.read_text()
            assert directory.stat().st_mode & 0o777 == 0o700
            yield started

    @contextmanager
    def engine(self, pod: Pod) -> Iterator[Engine]:
        pipe = subprocess.PIPE
        with pod.running("engine", ENGINE, stdin=pipe, stdout=pipe) as started:
            yield Engine(started)

    def close(self) -> None:
        cluster.stop([self.redis])
        self.hosts.close()
        for path in self.mounted:
            subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    made = Kubernetes(tmp_path)
    yield made
    made.close()


def test_pods_of_one_host_share_memory_and_others_read_it_over_the_network(
    kubernetes: Kubernetes, tmp_path: Path
) -> None:
    node, engine = template("node.yaml"), template("engine.yaml")
    with (
        kubernetes.node(kubernetes.pod("a", node), tmp_path / "log-a"),
        kubernetes.node(kubernetes.pod("b", node), tmp_path / "log-b"),
        kubernetes.engine(kubernetes.pod("a", engine)) as saves,
        kubernetes.engine(kubernetes.pod("a", engine)) as beside,
        kubernetes.engine(kubernetes.pod("b", engine)) as elsewhere,
    ):
        assert saves.put() == VALUES
        assert beside.get() == VALUES
        assert elsewhere.get() == VALUES
        assert "stream_hits" not in beside.ways()
        assert elsewhere.ways()["stream_hits"] >= VALUES


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_the_pod_that_follows_a_nodes_pod_has_its_blocks_again(
    kubernetes: Kubernetes, tmp_path: Path, number: signal.Signals
) -> None:
    node, engine = template("node.yaml"), template("engine.yaml")
    with kubernetes.engine(kubernetes.pod("a", engine)) as former:
        with kubernetes.node(kubernetes.pod("a", node), tmp_path / "log-1") as started:
            assert former.put() == VALUES
            started.signal(number)
            ended = started.process.wait(STOP_TIMEOUT_S)
            assert (ended == 0) is (number is signal.SIGTERM)
        with (
            kubernetes.node(kubernetes.pod("a", node), tmp_path / "log-2"),
            kubernetes.engine(kubernetes.pod("a", engine)) as new,
        ):
            assert new.get() == VALUES
            wait_until(lambda: former.get() == VALUES, "all are hits again", START_TIMEOUT_S)


def test_probes_and_prometheus_are_answered_in_the_pod(
    kubernetes: Kubernetes, tmp_path: Path
) -> None:
    pod = kubernetes.pod("a", template("node.yaml"))
    of = pod.container("node")
    (port,) = [port["containerPort"] for port in of["ports"] if port["name"] == "metrics"]
    paths = {of[kind]["httpGet"]["path"] for kind in of if kind.endswith("Probe")} | {"/metrics"}

    def answer(path: str) -> str:
        url = f"http://{kubernetes.hosts.address('a')}:{port}{path}"
        read = f"import urllib.request as u; print(u.urlopen({url!r}).read().decode())"
        words = kubernetes.hosts.command("b", [sys.executable, "-c", read])
        return subprocess.check_output(words, text=True, timeout=60)

    with kubernetes.node(pod, tmp_path / "log"):
        found = {path: answer(path) for path in paths}
    assert found.keys() == {"/live", "/ready", "/metrics"}
    assert "yes" in found["/live"]
    assert "yes" in found["/ready"]
    assert "kvstore_node_capacity_bytes" in found["/metrics"]


def test_pods_with_a_node_of_their_own_read_each_other_over_the_network(
    kubernetes: Kubernetes, tmp_path: Path
) -> None:
    spec = template("one-pod.yaml")
    group = spec["securityContext"]["fsGroup"]
    one = kubernetes.pod("a", spec, shm=kubernetes.shm("of-one-pod", group=group))
    other = kubernetes.pod("b", spec, shm=kubernetes.shm("of-other-pod", group=group))
    with (
        kubernetes.node(one, tmp_path / "log-a"),
        kubernetes.node(other, tmp_path / "log-b"),
        kubernetes.engine(one) as saves,
        kubernetes.engine(other) as reads,
    ):
        assert saves.put() == VALUES
        assert reads.get() == VALUES
        assert reads.ways()["stream_hits"] >= VALUES
