"""docker-compose.yml as far as it can be checked without starting it (scripts/compose-check does).

Skipped by name where Docker is not.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector.metrics import METRICS
from kvstore.node.metrics import DISK_FAMILIES, FAMILIES, HISTOGRAMS, MISSED

REPOSITORY = Path(__file__).parents[2]
DASHBOARD = REPOSITORY / "deploy/grafana/dashboards/kvstore.json"
HOSTS = {
    "host-a": {"node-a", "producer-a", "consumer-a", "producer-gpu", "consumer-gpu"},
    "host-b": {"node-b", "producer-b", "consumer-b"},
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("no docker on the PATH")
    known = subprocess.run([docker, "compose", "version"], capture_output=True, timeout=60)
    if known.returncode:
        pytest.skip("docker has no compose plugin")
    profiles = ("--profile", "gpu", "--profile", "monitoring")
    told = subprocess.run(
        [docker, "compose", *profiles, "config", "--format", "json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_a_host_is_one_shared_memory_and_one_run_directory(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for host, members in HOSTS.items():
        assert services[host]["ipc"] == "shareable"
        assert {n for n, s in services.items() if s.get("ipc") == f"service:{host}"} == members
        directory = host.replace("host", "run")
        users = {
            name
            for name, service in services.items()
            if any(v.get("source") == directory for v in service.get("volumes", ()))
        }
        assert users == members


def test_what_is_ours_runs_as_nobody_special(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if service.get("image") in ("kvstore-store", "kvstore-engine"):
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
    stages = (REPOSITORY / "Dockerfile").read_text().split("\nFROM ")
    for target in ("AS engine\n", "AS store\n"):
        (stage,) = (s for s in stages if target in s)
        assert "USER 10001:10001" in stage


def test_without_a_profile_there_is_neither_a_gpu_nor_monitoring(compose: dict[str, Any]) -> None:
    profiles = {name: s.get("profiles") for name, s in compose["services"].items()}
    assert {n for n, p in profiles.items() if p == ["gpu"]} == {
        *("producer-gpu", "consumer-gpu", "router-gpu")
    }
    assert {n for n, p in profiles.items() if p == ["monitoring"]} == {"prometheus", "grafana"}
    assert sum(p is None for p in profiles.values()) == 12


def test_every_service_that_stays_has_a_healthcheck(compose: dict[str, Any]) -> None:
    """Hosts only own memory; a driver and a model end; images of others have their own ways."""
    without = {"host-a", "host-b", "driver", "model", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert ("healthcheck" in service) != (name in without), name


def test_what_serves_is_started_again_when_it_ends_by_itself(compose: dict[str, Any]) -> None:
    services = compose["services"]
    ends = {"host-a", "host-b", "model", "driver", "prometheus", "grafana"}
    assert {n for n, s in services.items() if "restart" not in s} == ends


def test_a_stopped_engine_is_killed_before_its_requests_wait_long(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if name.startswith(("producer", "consumer")):
            assert service["stop_grace_period"] == "4s", name


def test_engines_of_a_kind_start_alike_and_keep_to_their_roles(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for kind, role in (("producer", "kv_producer"), ("consumer", "kv_consumer")):
        one, other = (services[f"{kind}-{host}"]["command"] for host in "ab")
        assert one == other
        assert [s["command"][-2] for n, s in services.items() if n.startswith(kind)] == [
            "--kv-transfer-config"
        ] * 3
        transfer = json.loads(one[-1])
        assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == (role, "recompute")


def test_the_provisioned_dashboard_is_one() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] == "kvstore"
    assert all(panel["targets"] for panel in dashboard["panels"])


def test_the_dashboard_asks_for_what_nodes_tell() -> None:
    asked = set(re.findall(r"kvstore_node_(\w+)", DASHBOARD.read_text()))
    assert asked
    known = {family.name + "_total" * family.counter for family in (*FAMILIES, *DISK_FAMILIES)}
    known |= {f"{family.name}_bucket" for family in HISTOGRAMS}
    assert asked <= known | {f"{MISSED}_total", "info"}


def test_prometheus_asks_nodes_where_they_answer() -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    (job,) = (j for j in _scraped() if j["job_name"] == "nodes")
    (found,) = job["dns_sd_configs"]
    for name in found["names"]:
        assert f"--metrics=:{found['port']}" in services[name]["command"]


def _scraped() -> list[dict[str, Any]]:
    scraped: list[dict[str, Any]] = yaml.safe_load(
        (REPOSITORY / "deploy/prometheus.yml").read_text()
    )["scrape_configs"]
    return scraped


def test_the_dashboard_asks_for_counters_that_the_connector_has() -> None:
    asked = set(re.findall(r"vllm:(kvstore_\w+)", DASHBOARD.read_text()))
    assert asked
    assert asked <= {
        metric.name + suffix
        for metric in METRICS
        for suffix in (("_bucket", "_sum", "_count") if metric.buckets else ("_total",))
    }
