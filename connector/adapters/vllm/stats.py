"""Feeds vLLM's statistics and Prometheus metrics with what the two sides count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connector.metrics import METRICS, labelled, summary
from connector.stats import CountStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Carries vLLM's statistics of this connector; their data is that of `CountStats.to_dict`."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        self.data = CountStats(self.data).aggregate(CountStats(other.data)).to_dict()
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return CountStats(self.data).is_empty()


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Shows each of `METRICS` as `vllm:NAME`, with vLLM's labels and its own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Counter | Histogram] = {}
        for metric in METRICS:
            made: dict[str, object] = {
                "name": f"vllm:{metric.name}",
                "documentation": metric.help,
                "labelnames": [*labelnames, metric.label] if metric.label else labelnames,
            }
            if metric.buckets:
                made["buckets"] = list(metric.buckets)
            kind = metric_types[Histogram if metric.buckets else Counter]
            self._metrics[metric.name] = kind(**made)
            # There with 0 before anything happens, as vLLM's own are.
            known = [[value] for value in metric.values] if metric.label else [[]]
            for of_engine in per_engine_labelvalues.values():
                for own in known:
                    self._metrics[metric.name].labels(*of_engine, *own)

    def observe(
        self, transfer_stats_data: dict[str, float | list[float]], engine_idx: int = 0
    ) -> None:
        of_engine = self.per_engine_labelvalues[engine_idx]
        for name, label, value in labelled(transfer_stats_data):
            metric = self._metrics[name].labels(*of_engine, *([label] if label else []))
            if isinstance(value, list):
                for sample in value:
                    metric.observe(sample)
            else:
                metric.inc(value)
