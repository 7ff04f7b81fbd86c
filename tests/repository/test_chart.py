"""deploy/helm: the chart's committed rendering is current, valid, and runs what node.yaml runs."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from test_kubernetes import RELEASES, UNITS, containers

import kvstore
from kvstore.cli import _parse
from kvstore.segment.cgroup import MemoryLimit, check_limit

ROOT = Path(__file__).parents[2]
HELM = ROOT / "deploy" / "helm"
OPERATOR = "monitoring.coreos.com/v1"
"""The Prometheus operator's, of which Kubernetes has no schema."""


def documents() -> dict[str, dict[str, Any]]:
    made = yaml.safe_load_all((HELM / "rendered.yaml").read_text())
    return {one["kind"]: one for one in made}


def digest() -> str:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "scripts" / "lib" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.digest())


def test_the_rendering_is_of_this_chart() -> None:
    head = (HELM / "rendered.yaml").read_text().splitlines()[0]
    assert head.endswith(digest()), "scripts/chart makes it"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_helms_own_engine_renders_the_same_and_finds_nothing_to_say() -> None:
    ran = subprocess.run(
        [str(ROOT / "scripts" / "chart"), "--check"], capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_knows_each_field(release: str) -> None:
    for document in documents().values():
        if document["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(document, release, strict=True)


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((HELM / "kvstore" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == kvstore.__version__


def with_its_disk(manifest: Path) -> dict[str, Any]:
    """A manifest's pod, with the lines that say how to have a disk."""
    lines = manifest.read_text().replace("# - ", "- ").replace("#   hostPath", "  hostPath")
    spec: dict[str, Any] = yaml.safe_load(lines)["spec"]["template"]["spec"]
    return spec


def test_its_node_is_that_of_the_manifests() -> None:
    """Image, name of Redis and memory limit aside: the one is a user's, the other is counted; and
    how often a disk is written."""
    ours = documents()["DaemonSet"]["spec"]["template"]["spec"]
    theirs = with_its_disk(ROOT / "deploy/kubernetes/node.yaml")
    containers(ours)["node"]["args"].remove("--disk-writes-per-day=1")
    for spec in (ours, theirs):
        node = containers(spec)["node"]
        for name in ("image", "resources"):
            del node[name]
        (url,) = (one for one in node["env"] if one["name"] == "KVSTORE_URL")
        del url["value"]
    assert ours == theirs


def test_its_limit_holds_the_node() -> None:
    node = containers(documents()["DaemonSet"]["spec"]["template"]["spec"])["node"]
    limit = node["resources"]["limits"]["memory"]
    limit_bytes = int(limit[:-2]) * UNITS[limit[-2:]]
    check_limit(_parse(node["args"]).size, MemoryLimit(limit_bytes, Path("memory.max")))


def test_a_disk_is_mounted_where_the_node_looks_for_it() -> None:
    spec = documents()["DaemonSet"]["spec"]["template"]["spec"]
    args = _parse(containers(spec)["node"]["args"])
    mounts = {one["name"]: one["mountPath"] for one in containers(spec)["node"]["volumeMounts"]}
    (volume,) = (one for one in spec["volumes"] if one["name"] == "disk")
    assert args.disk == [mounts["disk"]] == [volume["hostPath"]["path"]]
    assert args.disk_size == [1 << 40]


def labels(document: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = document["spec"]["template"]["metadata"]["labels"]
    return found


def test_whatever_selects_pods_selects_those_of_the_chart() -> None:
    made = documents()
    node, redis = made["DaemonSet"], made["Deployment"]
    selected = [
        (node["spec"]["selector"]["matchLabels"], node),
        (redis["spec"]["selector"]["matchLabels"], redis),
        (made["Service"]["spec"]["selector"], redis),
        (made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"], redis),
        (made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"], redis),
        (made["PodMonitor"]["spec"]["selector"]["matchLabels"], node),
    ]
    for wanted, of in selected:
        assert wanted.items() <= labels(of).items()
    assert labels(node).items() ^ labels(redis).items(), "or one would be taken for the other"


def test_prometheus_and_nodes_find_what_they_ask_for() -> None:
    made = documents()
    node = containers(made["DaemonSet"]["spec"]["template"]["spec"])["node"]
    (endpoint,) = made["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert made["PodMonitor"]["apiVersion"] == OPERATOR
    assert endpoint["port"] in {port["name"] for port in node["ports"]}
    (url,) = (one["value"] for one in node["env"] if one["name"] == "KVSTORE_URL")
    assert url == f"redis://{made['Service']['metadata']['name']}:6379"


def test_no_image_is_invented() -> None:
    values = yaml.safe_load((HELM / "kvstore" / "values.yaml").read_text())
    assert values["image"] == {"repository": "", "tag": "", "digest": ""}
