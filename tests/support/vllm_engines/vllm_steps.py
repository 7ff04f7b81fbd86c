"""What model engines tell vLLM's scheduler: requests, and what a step has computed and moved.
Imports vLLM when it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def new_request(
    name: str,
    tokens: list[int],
    max_tokens: int,
    hasher: Any,
    *,
    params: Mapping[str, Any] | None = None,
    stop: Iterable[int] = (),
    **more: Any,
) -> Any:
    """Return a request of `max_tokens` tokens that are not drawn; `params` are its
    `kv_transfer_params`."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stop)
    )
    if params is not None:
        parameters.extra_args = {"kv_transfer_params": dict(params)}
    parameters.update_from_generation_config({}, None)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=parameters,
        pooling_params=None,
        block_hasher=hasher,
        **more,
    )


def transferred(worker: Any, finished: set[str]) -> Any:
    """End the step of a worker's side of the connector; what it says of that."""
    from vllm.v1.outputs import KVConnectorOutput

    worker.wait_for_save()
    results = worker.get_transfer_results(finished)
    transfers = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_cache_events=worker.get_kv_connector_kv_cache_events(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    worker.clear_connector_metadata()
    return transfers


def step_output(sampled: Mapping[str, list[int]], transfers: Any) -> Any:
    """Return what a model runner answers."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={name: i for i, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=transfers,
    )
