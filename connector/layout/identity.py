"""Makes the namespace fields that say what an engine computes with: weights and configuration."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from connector.limits import FINGERPRINTS_KEPT_MAX
from kvstore import KVStoreError, weights_fingerprint

log = logging.getLogger(f"kvstore.{__name__}")

NAMES_ONLY = (
    "_name_or_path",
    "_commit_hash",
    "name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
)
"""Fields of a model's configuration that shape no forward, or (dtype) have a field of their own."""


def digest_of(value: object) -> str:
    """Return 16 hexadecimal digits that are the same for equal values, in every process."""
    raw = json.dumps(value, sort_keys=True, default=str).encode()
    return blake2b(raw, digest_size=8).hexdigest()


def forward_digest(config: Mapping[str, object], leave_out: Collection[str] = NAMES_ONLY) -> str:
    """Return the digest of all that may shape the forward in a model's configuration, at any depth.

    An unknown field counts: a field too many costs hits, one too few gives wrong KV.
    """
    return digest_of(_kept(config, leave_out))


def _kept(value: object, leave_out: Collection[str]) -> object:
    if isinstance(value, Mapping):
        return {str(k): _kept(v, leave_out) for k, v in value.items() if k not in leave_out}
    if isinstance(value, list | tuple):
        return [_kept(item, leave_out) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value


def config_digest(path: str | os.PathLike[str]) -> str:
    """Return `forward_digest` of the `config.json` beside the weights; empty where there is
    none."""
    try:
        fields = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    return forward_digest(fields) if isinstance(fields, dict) else ""


def files_of(
    name: str, revision: str | None = None, cache_dir: str | None = None
) -> tuple[Path | None, str]:
    """Return where the files of a model lie that is named by a path or by its place on the Hugging
    Face Hub, or None and why they are nowhere on this host. Fetches nothing."""
    if Path(name).exists():
        return Path(name), ""
    if "://" in name:
        return None, f"{name} is no path of this host"
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
        return Path(found), ""
    except Exception as e:  # whatever it is: an engine that could start goes on
        return None, f"{name} is neither a path nor in the Hugging Face cache ({e})"


def weights_digest(path: str | os.PathLike[str]) -> str:
    """Return `kvstore.weights_fingerprint`, computed once in this process for the same files.

    Raises `UsageError` and `DeadlineError` as it does.
    """
    return _fingerprint(str(path), _seen(Path(path)))


@lru_cache(maxsize=FINGERPRINTS_KEPT_MAX)
def _fingerprint(path: str, seen: object) -> str:
    return weights_fingerprint(path)


def _seen(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return what tells files from those that are put in their place, on this host and at this
    moment."""
    try:
        places = [path] if path.is_file() else sorted(path.iterdir())
        stats = [(place.name, place.stat()) for place in places]
    except OSError:
        return ()
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


def weights_or_unknown(path: str | os.PathLike[str] | None, why_not: str, unknown: str) -> str:
    """Return the fingerprint of the weights in `path`, or `unknown`, which nobody else may use.

    `path` None: there is none to be had, because of `why_not`. Says so, once for each.
    """
    problem: object = why_not
    if path is not None:
        try:
            return weights_digest(path)
        except (KVStoreError, OSError) as e:
            problem = e
    _say_unknown(str(problem))
    return unknown


@lru_cache(maxsize=FINGERPRINTS_KEPT_MAX)
def _say_unknown(problem: str) -> None:
    log.warning(
        "the weights have no fingerprint, so nothing is shared with other engines or kept for "
        "the next start of this one: %s. Set weights_id to a name of your own that changes with "
        "the weights",
        problem,
    )
