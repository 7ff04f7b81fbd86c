"""Reads what SGLang's process computes with: the fields of the namespace that no pool has."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import sglang

from connector.layout.identity import config_digest, digest_of, files_of, weights_or_unknown

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from connector.layout.geometry import Field

UNREADABLE_FORMATS = ("dummy", "remote", "remote_instance", "runai_streamer", "private")
"""`load_format`s whose weights are in no file of this host."""
FORWARD_ARGS = (
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "rl_quant_profile",
    "kt_method",
    "kt_weight_path",
    "forward_hooks",
)
"""Arguments of the server, beside those with a field of their own, that change what it computes."""
_OF_THIS_PROCESS = f"of process {uuid4().hex}"


def engine_fields(weights_id: str | None) -> dict[str, Field]:
    """Return namespace fields that SGLang's process knows."""
    fields: dict[str, Field] = {"version": str(sglang.__version__)}
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        model, revision = str(args.model_path), getattr(args, "revision", None)
    except (ImportError, ValueError, AttributeError, RuntimeError, AssertionError):
        if weights_id is None:
            why_not = "the server's arguments cannot be read"
            fields["weights"] = weights_or_unknown(None, why_not, _OF_THIS_PROCESS)
        return fields
    path, why_not = files_of(model, revision, getattr(args, "download_dir", None))
    if weights_id is None:
        if str(getattr(args, "load_format", "auto")) in UNREADABLE_FORMATS:
            path, why_not = None, f"load_format {args.load_format} reads no files of this host"
        fields["weights"] = weights_or_unknown(path, why_not, _OF_THIS_PROCESS)
    fields["forward"] = config_digest(path) if path is not None else ""
    for field, name in (
        ("overrides", "json_model_override_args"),
        ("weights_dtype", "dtype"),
        ("quantisation", "quantization"),
        ("kv_cache_dtype", "kv_cache_dtype"),
    ):
        fields[field] = str(getattr(args, name, None) or "")
    fields["forward_args"] = digest_of([str(getattr(args, one, None)) for one in FORWARD_ARGS])
    scales = getattr(args, "quantization_param_path", None)
    if scales:
        path, why_not = files_of(str(scales))
        fields["kv_scales"] = weights_or_unknown(path, why_not, _OF_THIS_PROCESS)
    fields["adapters"] = _adapters(args)
    return fields


def _adapters(args: ServerArgs) -> str:
    """Return what stands for the LoRA adapters that the server was started with, if any.

    SGLang's page hashes know these by name and path alone, whatever lies there. An adapter that is
    loaded later has a number in them that no other has.
    """
    try:
        from sglang.srt.runtime_context import get_lora

        lora = get_lora()
        references = (lora.lora_paths or ()) if lora.enable_lora else ()
    except (ImportError, ValueError, AttributeError, RuntimeError, AssertionError):
        return _OF_THIS_PROCESS if getattr(args, "lora_paths", None) else ""
    adapters: list[tuple[str, str, str]] = []
    for one in references:
        path, why_not = files_of(one.lora_path, None, getattr(args, "download_dir", None))
        files = weights_or_unknown(path, why_not, _OF_THIS_PROCESS)
        adapters.append((one.lora_name, one.lora_path, files))
    return digest_of(sorted(adapters)) if adapters else ""


def draft_fields(weights_id: str | None) -> dict[str, Field]:
    """Return what a draft model's pages depend on besides; `weights_id` stands for its weights
    too."""
    try:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        algorithm = str(getattr(args, "speculative_algorithm", None) or "")
        path = getattr(args, "speculative_draft_model_path", None)
        revision = getattr(args, "speculative_draft_model_revision", None)
    except (ImportError, ValueError, AttributeError, RuntimeError, AssertionError):
        return {"draft": ""}
    fields: dict[str, Field] = {"draft": algorithm}
    if path and weights_id is None:
        where, why_not = files_of(str(path), revision, getattr(args, "download_dir", None))
        fields["draft_weights"] = weights_or_unknown(where, why_not, _OF_THIS_PROCESS)
        fields["draft_forward"] = config_digest(where) if where is not None else ""
    return fields
