import pytest

from kvstore.protocol.fabric import HANDLE_BYTES, NAME_BYTES, FabricMemory, unpack_fabric
from kvstore.protocol.stream import WireError

MEMORY = FabricMemory(b"n" * NAME_BYTES, 1 << 30, b"h" * HANDLE_BYTES)


def test_memory_is_read_as_it_was_sent_and_none_is_none() -> None:
    assert unpack_fabric(list(MEMORY)) == MEMORY
    assert unpack_fabric([]) is None


@pytest.mark.parametrize("size_bytes", [1, 1 << 48])
def test_memory_of_any_size_is_taken(size_bytes: int) -> None:
    memory = MEMORY._replace(size_bytes=size_bytes)
    assert unpack_fabric(list(memory)) == memory


@pytest.mark.parametrize(
    "lie",
    [
        {"name": b"n" * 15},
        {"name": "n" * NAME_BYTES},
        {"size_bytes": 0},
        {"size_bytes": (1 << 48) + 1},
        {"size_bytes": True},
        {"size_bytes": 1.5},
        {"handle": b"h" * 63},
        {"handle": b"h" * 65},
        {"handle": None},
    ],
    ids=str,
)
def test_what_cannot_be_memory_of_a_fabric_is_refused(lie: dict[str, object]) -> None:
    with pytest.raises(WireError):
        unpack_fabric(list(MEMORY._replace(**lie)))


def test_too_much_or_too_little_is_refused() -> None:
    for answers in (list(MEMORY)[:-1], [*MEMORY, 1]):
        with pytest.raises(WireError):
            unpack_fabric(answers)
