"""Answers requests that are handed over, with the fields of vLLM's routers.

vLLM's, llm-d's and Dynamo's routers send a prompt to a prefill engine with `do_remote_decode` in
its `kv_transfer_params`, and give what that one answers to a decode engine as they got it. The
answer has the fields of vLLM's NixlConnector; none of them says where the KV is: the decode engine
finds it in the store by the prompt. `HANDED_TOKENS` says for how much of it it is worth to wait.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from connector.scheduler.request_settings import HANDED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.request import Request

    from connector.scheduler.lockstep import LockstepScheduler
    from connector.scheduler.scheduler import SchedulerCore

_WHOLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
MULTI_CONNECTOR = "MultiConnector"


def hand_over(
    side: SchedulerCore | LockstepScheduler, request: Request, engine_id: str
) -> dict[str, object] | None:
    """Return the answer to a request that has ended; None when it does not ask for one, or broke
    off."""
    params = request.kv_transfer_params
    if not params or params.get("do_remote_decode") is not True or request.status not in _WHOLE:
        return None
    tokens = side.handed_over(request.request_id)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": str(request.request_id),
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": tokens,
        HANDED_TOKENS: tokens,
    }


def within_multi_connector() -> bool:
    """Return whether a MultiConnector is being made right now, whose child the caller is.

    vLLM ends the engine when two children answer one request: the answer is another one's then, if
    anybody's.
    """
    return multi_connector() is not None


def multi_connector() -> KVConnectorBase_V1 | None:
    """Return the MultiConnector that is being made right now, whose child the caller is; None
    without one. vLLM tells a child nothing of its parent."""
    for caller in callers():
        made = caller.f_locals.get("self") if caller.f_code.co_name == "__init__" else None
        if any(kind.__name__ == MULTI_CONNECTOR for kind in type(made).__mro__):
            return made
    return None


def callers() -> Iterator[FrameType]:
    """Yield the frames of the callers of the caller, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
