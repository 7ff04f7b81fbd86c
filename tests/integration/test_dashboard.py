"""Dashboard and alerts before a real Prometheus, which scrapes a real cluster."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess

from connector.metrics import METRICS
from kvstore import Client
from kvstore.testing.ports import held_ports

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = Path(__file__).parents[2] / "docs"
RULES = DEPLOY / "prometheus"
PANELS = json.loads((DEPLOY / "grafana/dashboards/kvstore.json").read_text())["panels"]
SCRAPED_EVERY_S = 1
RATE_INTERVAL = "30s"
HOW = ("running", "waiting")
BLOCK = 64
SECRET = "the secret of this test, long enough"
PROMPT_TOKENS = 4 * BLOCK + 2


class Prometheus:
    """A server that scrapes these (job, port), with the rules of deploy/."""

    def __init__(self, targets: list[tuple[str, int]], directory: Path) -> None:
        jobs: dict[str, list[str]] = {}
        for job, port in targets:
            jobs.setdefault(job, []).append(f"127.0.0.1:{port}")
        shutil.copytree(RULES, directory / "prometheus")
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        every = f"{SCRAPED_EVERY_S}s"
        config["global"] = {"scrape_interval": every, "evaluation_interval": every}
        found_by = ("dns_sd_configs", "relabel_configs")
        config["scrape_configs"] = [
            {name: value for name, value in job.items() if name not in found_by}
            | {"static_configs": [{"targets": jobs[job["job_name"]]}]}
            for job in config["scrape_configs"]
            if job["job_name"] in jobs
        ]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._held = ExitStack()
        (self.port,) = self._held.enter_context(held_ports(1))
        self._log = (directory / "log").open("w")
        self._process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={directory / 'prometheus.yml'}"),
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def numbers(self, expression: str) -> list[float]:
        """What a panel draws at this moment."""
        found = self.ask("query", query=expression.replace("$__rate_interval", RATE_INTERVAL))
        values = [float(one["value"][1]) for one in found["result"]]
        return [value for value in values if not math.isnan(value)]

    def rules(self) -> list[str]:
        """How each alert rule fares."""
        (group,) = self.ask("rules")["groups"]
        return [str(one["health"]) for one in group["rules"]]

    def ready(self) -> bool:
        try:
            active = self.ask("targets")["activeTargets"]
        except OSError:
            return False
        return bool(active) and all(one["health"] == "up" for one in active)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._held.close()
        self._log.close()


def asked_of(panels: list[dict[str, Any]]) -> dict[str, str]:
    """Every expression by its panel and name."""
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@contextmanager
def nodes(redis: RedisServer) -> Iterator[tuple[list[NodeProcess], list[tuple[str, int]]]]:
    """Two nodes, each as if on a host of its own, and where they answer Prometheus."""
    secret = {"KVSTORE_SECRET": SECRET}
    with held_ports(2) as ports, ExitStack() as stack:
        made: list[NodeProcess] = []
        for at in ports:
            prefix = made[0].key_prefix if made else None
            disk = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-"))
            options = ("--metrics", f"127.0.0.1:{at}", "--listen", "127.0.0.1:0")
            options += ("--disk", disk, "--disk-size", "16MiB", "--disk-force")
            made.append(
                stack.enter_context(
                    NodeProcess(redis, key_prefix=prefix, options=options, environment=secret)
                )
            )
        yield made, [("nodes", at) for at in ports]


def work(made: list[NodeProcess], monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """More values than one node holds, again and again, and all of them read from the other host:
    the nodes store, evict, are asked again, and serve."""
    monkeypatch.setenv("KVSTORE_SECRET", SECRET)
    one, other = (Client(**node.client_options) for node in made)
    with one, other:
        for _ in range(times):
            for i in range(24):
                one.put(f"k{i}", random.randbytes(MIB))
            time.sleep(SCRAPED_EVERY_S)
            assert any(other.get(f"k{i}") is not None for i in range(24))


def wait_for_data(prometheus: Prometheus, panels: list[dict[str, Any]]) -> None:
    """Each query of each panel has an answer."""
    missing = set(asked_of(panels))

    def drawn() -> bool:
        for name in sorted(missing):
            if prometheus.numbers(asked_of(panels)[name]):
                missing.discard(name)
        return not missing

    try:
        wait_until(drawn, "data", 40)
    except AssertionError:
        raise AssertionError(f"no data for {sorted(missing)}") from None


def of_nodes(panel: dict[str, Any]) -> bool:
    return "vllm:" not in json.dumps(panel)


def test_there_are_sixteen_panels_for_nodes_and_engines() -> None:
    assert len(PANELS) == 16
    assert 5 <= sum(map(of_nodes, PANELS)) <= 10


@pytest.mark.prometheus
@pytest.mark.timeout(180)
def test_every_panel_of_nodes_has_data(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes(redis_server) as (made, targets), ExitStack() as stack:
        prometheus = Prometheus(targets, tmp_path)
        stack.callback(prometheus.close)
        wait_until(prometheus.ready, "all targets are scraped", 40)
        work(made, monkeypatch, 6)
        wait_for_data(prometheus, [panel for panel in PANELS if of_nodes(panel)])
        wait_until(lambda: prometheus.rules() == ["ok"] * 9, "all rules are evaluated", 40)
        served = "sum(kvstore_node_served_bytes_total)"
        assert prometheus.numbers(served)[0] >= MIB


@contextmanager
def engine_model() -> Iterator[tuple[str, int]]:
    """Answers as an engine of vLLM's does, with every metric of the connector under the name and
    the labels that its adapter gives it; the long test asks vLLM itself."""
    registry = CollectorRegistry()
    gauges = [Gauge(f"vllm:num_requests_{how}", how, registry=registry) for how in HOW]
    counters: list[Counter] = []
    histograms = [Histogram("vllm:time_to_first_token_seconds", "t", registry=registry)]
    for metric in METRICS:
        name, labels = f"vllm:{metric.name}", [metric.label] * bool(metric.label)
        if metric.buckets:
            histograms.append(Histogram(name, metric.help, labels, registry=registry))
        else:
            counter = Counter(name, metric.help, labels, registry=registry)
            counters += [counter.labels(one) for one in metric.values] if labels else [counter]
    server, thread = start_http_server(0, "127.0.0.1", registry)
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.2):
            for counter in counters:
                counter.inc()
            for histogram in histograms:
                histogram.observe(0.1)
            for gauge in gauges:
                gauge.set(1)

    worker = threading.Thread(target=live)
    worker.start()
    try:
        yield "engines", server.server_port
    finally:
        over.set()
        worker.join(10)
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.prometheus
@pytest.mark.timeout(180)
def test_every_panel_of_engines_has_data(tmp_path: Path) -> None:
    with engine_model() as target, ExitStack() as stack:
        prometheus = Prometheus([target], tmp_path)
        stack.callback(prometheus.close)
        wait_until(prometheus.ready, "the engine is scraped", 40)
        wait_for_data(prometheus, [panel for panel in PANELS if not of_nodes(panel)])


@pytest.mark.prometheus
@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_panel_has_data_where_an_engine_serves(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own server over one of two nodes, and a Prometheus that scrapes all three."""
    from engines import ModelShape, build_model, cpu_dtype
    from vllm_server import VllmServer, build_tokenizer

    model = build_model(tmp_path / "llama", ModelShape(context_tokens=1024))
    build_tokenizer(model, 512)
    with nodes(redis_server) as (made, targets), ExitStack() as stack:
        place = {**made[0].engine_settings, "load_timeout_s": 30.0, "block_tokens": BLOCK}
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": place,
        }
        small = (
            f"--dtype {cpu_dtype()} --enforce-eager --block-size 32 --seed 0 --max-model-len 1024 "
            f"--max-num-batched-tokens {4 * BLOCK} --max-num-seqs 8 --num-gpu-blocks-override 48"
        )
        command = ["vllm", "serve", str(model), "--kv-transfer-config", json.dumps(transfer)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "KVSTORE_SECRET": SECRET,
        }
        server = VllmServer([*command, *small.split()], environment, tmp_path / "log-vllm")
        stack.callback(server.close)
        server.wait()
        prometheus = Prometheus([*targets, ("engines", server.port)], tmp_path)
        stack.callback(prometheus.close)
        wait_until(prometheus.ready, "all targets are scraped", 40)
        rng = random.Random(3)
        prompts = [[rng.randrange(2, 500) for _ in range(PROMPT_TOKENS)] for _ in range(12)]
        for _ in range(3):  # more than the engine's own cache holds: later rounds load
            for prompt in prompts:
                server.complete(prompt, 2)
        work(made, monkeypatch, 4)
        for prompt in prompts:
            server.complete(prompt, 2)
        wait_for_data(prometheus, PANELS)
        shares = asked_of(PANELS[:1]).values()
        assert sum(prometheus.numbers(share)[0] for share in shares) == pytest.approx(1.0, abs=0.02)


def test_each_of_nine_alerts_has_a_runbook_entry() -> None:
    headings = re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in alerts()] == headings
    assert len(headings) == 9
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.prometheus
def test_promtool_tries_each_alert_when_all_is_well_and_when_it_is_not() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ran = subprocess.run(["promtool", *command], cwd=RULES, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    cases = yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]
    names = {rule["alert"] for rule in alerts()}
    assert {one["alertname"] for one in cases[0]["alert_rule_test"]} == names
    fired = {
        one["alertname"]
        for case in cases[1:]
        for one in case["alert_rule_test"]
        if one.get("exp_alerts")
    }
    assert fired == names
