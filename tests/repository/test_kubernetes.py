"""deploy/kubernetes as far as it can be checked without a cluster.

tests/integration/test_pods.py runs its pods.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from each_input import each

from kvstore.cli import _parse
from kvstore.segment.cgroup import MemoryLimit, check_limit

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = REPOSITORY / "deploy/kubernetes"
RELEASES = ("1.29.0", "1.34.0", "1.37.0")
"""The first with containers that start before a pod's others and go on beside them, and later."""
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def names() -> list[str]:
    return sorted(path.name for path in MANIFESTS.glob("*.yaml") if path.stem != "kustomization")


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents(name)[0]["spec"]["template"]["spec"]
    return spec


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in (*spec.get("initContainers", ()), *spec["containers"])}


NODES = [("node.yaml", "node"), ("one-pod.yaml", "node")]
ENGINES = [("engine.yaml", "engine"), ("one-pod.yaml", "engine")]


def container(of: tuple[str, str]) -> dict[str, Any]:
    return containers(pod(of[0]))[of[1]]


@each("release", RELEASES)
@each("name", names())
def test_kubernetes_knows_each_field(name: str, release: str) -> None:
    for document in documents(name):
        kubernetes_validate.validate(document, release, strict=True)


def test_no_manifest_uses_anchors_which_tools_read_differently() -> None:
    for name in names():
        assert not re.search(r"(^|[\s\[{])[&*]\w|<<:", (MANIFESTS / name).read_text()), name


def test_the_kustomization_has_all_but_the_other_way() -> None:
    (kustomization,) = documents("kustomization.yaml")
    assert sorted(kustomization["resources"]) == [n for n in names() if n != "one-pod.yaml"]


@pytest.mark.parametrize("node", NODES, ids=lambda of: of[0])
def test_the_memory_that_a_node_may_have_is_enough_for_its_size(node: tuple[str, str]) -> None:
    of = container(node)
    size = _parse(of["args"]).size
    limit = of["resources"]["limits"]["memory"]
    limit_bytes = int(limit[:-2]) * UNITS[limit[-2:]]
    check_limit(size, MemoryLimit(limit_bytes, Path("memory.max")))
    assert MemoryLimit(limit_bytes, Path()).segment_bytes > size


@pytest.mark.parametrize("node", NODES, ids=lambda of: of[0])
def test_a_node_listens_where_it_says(node: tuple[str, str]) -> None:
    of = container(node)
    args = _parse(of["args"])
    assert args.listen == f":{of['ports'][0]['containerPort']}"
    assert args.advertise == "$(POD_IP)"


@pytest.mark.parametrize("node", NODES, ids=lambda of: of[0])
def test_probes_and_prometheus_ask_where_the_node_answers(node: tuple[str, str]) -> None:
    of = container(node)
    ports = {port["name"]: port["containerPort"] for port in of["ports"]}
    assert _parse(of["args"]).metrics == f":{ports['metrics']}"
    template = documents(node[0])[0]["spec"]["template"]["metadata"]
    assert template["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    probes = {kind: of[kind]["httpGet"] for kind in of if kind.endswith("Probe")}
    assert {probe["port"] for probe in probes.values()} == {"metrics"}
    # A node whose Redis is away serves its host: it is not started again for that.
    assert probes["startupProbe"]["path"] == probes["livenessProbe"]["path"] == "/live"
    assert probes.get("readinessProbe", {"path": "/ready"})["path"] == "/ready"


def test_a_pod_whose_redis_is_away_goes_on_to_serve_requests() -> None:
    """The readiness of a pod is that of all of its containers."""
    assert "readinessProbe" not in container(("one-pod.yaml", "node"))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda of: of[0])
def test_engines_recompute_what_cannot_be_loaded(engine: tuple[str, str]) -> None:
    args = container(engine)["args"]
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector"] == "KVStoreConnector"


@pytest.mark.parametrize(
    ("node_of", "engine_of"), list(zip(NODES, ENGINES, strict=True)), ids=["two pods", "one pod"]
)
def test_node_and_engine_of_a_host_have_the_same_user_memory_and_secret(
    node_of: tuple[str, str], engine_of: tuple[str, str]
) -> None:
    node, engine = container(node_of), container(engine_of)
    same = ("KVSTORE_URL", "KVSTORE_SECRET", "KVSTORE_RUN_DIR")
    ours, theirs = ({e["name"]: e for e in c["env"]} for c in (node, engine))
    assert [ours[name] for name in same] == [theirs[name] for name in same]
    users = [pod(of[0])["securityContext"] for of in (node_of, engine_of)]
    assert users[0]["runAsUser"] == users[1]["runAsUser"]
    assert users[0]["runAsGroup"] == users[1]["runAsGroup"]
    for of in (node, engine):
        assert {"name": "shm", "mountPath": "/dev/shm"} in of["volumeMounts"]
    memory = [
        next(volume for volume in pod(of[0])["volumes"] if volume["name"] == "shm")
        for of in (node_of, engine_of)
    ]
    assert memory[0] == memory[1]


def test_pods_are_nobody_special() -> None:
    for name in names():
        for document in documents(name):
            spec = document.get("spec", {}).get("template", {}).get("spec")
            if spec is None:
                continue
            assert spec["securityContext"]["runAsNonRoot"], name
            assert not spec["automountServiceAccountToken"], name
            for of in containers(spec).values():
                assert of["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
                assert not of["securityContext"]["allowPrivilegeEscalation"], name


def test_one_pod_asks_for_nothing_of_the_host() -> None:
    """What Pod Security's level `restricted` forbids."""
    spec = pod("one-pod.yaml")
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(spec)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
