"""Asks SGLang itself whether its page hashes tell apart what must not be shared."""

from __future__ import annotations

from array import array
from itertools import product

from kvstore import UsageError

PAGE_TOKENS = 4


def check_page_hashes(version: str) -> None:
    """Raise `UsageError` unless requests with another LoRA adapter or another cache salt have other
    page hashes.

    SGLang's own trees always told them apart, its storage only since September 2026: with the
    hashes of before, one tenant's or adapter's pages would be another's. So it is not the
    version that is asked, but the function that SGLang hashes with.
    """
    try:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        tokens = array("q", range(PAGE_TOKENS))
        hashes = {
            str(
                get_storage_hash_str(
                    RadixKey(tokens, extra_key=lora, cache_salt=salt), page_size=PAGE_TOKENS
                )
            )
            for lora, salt in product((None, "a", "b"), (None, "a", "b"))
        }
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as e:
        raise UsageError("sglang", version, f"{_REMEDY} ({type(e).__name__}: {e})") from e
    if len(hashes) != 9:
        raise UsageError("sglang", version, _REMEDY)


_REMEDY = (
    "must hash LoRA adapters and cache salts into the names of pages: else one tenant's pages "
    "would be another's. Upgrade to SGLang 0.5.23"
)
