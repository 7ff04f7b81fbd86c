"""Payloads in chunks: nothing is lost or out of order, and each one's checksum is its own."""

import os

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.chunks import CHUNK_BYTES, Digests, chunked

MEMORY = memoryview(os.urandom(3 * CHUNK_BYTES))
sizes = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 7]),
)


@given(st.lists(st.lists(sizes, max_size=4), max_size=6))
def test_chunks_are_the_payloads_in_order_and_digest_to_their_checksums(layout):
    payloads = [[MEMORY[i : i + size] for i, size in enumerate(pieces)] for pieces in layout]
    chunks = chunked(payloads)
    digests = Digests([sum(pieces) for pieces in layout])
    seen = [b""] * len(payloads)
    for chunk in chunks:
        assert 0 < sum(piece.nbytes for piece in chunk.pieces) <= CHUNK_BYTES
        digests.update(chunk)
        for piece, number in zip(*chunk, strict=True):
            seen[number] += piece
    for number, pieces in enumerate(payloads):
        whole = b"".join(pieces)
        assert seen[number] == whole
        assert digests.value(number) == xxhash.xxh3_64_intdigest(whole)
