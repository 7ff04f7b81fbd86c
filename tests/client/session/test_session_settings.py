"""What a session's settings make of its parts, without a node, an index or a thread."""

import pytest

from kvstore import Limits, StreamSecurity, UsageError
from kvstore.client.nodes.saving import embedded_node
from kvstore.client.session import BlockSession
from kvstore.config_file import read_config
from kvstore.index.memory import MemoryIndex
from kvstore.index.open import OpenedIndex
from kvstore.transport.cuda_memory import NAME as CUDA_IPC
from kvstore.transport.registry import SHM, TRANSPORTS

DEVICE = object()
SIZE_BYTES = 64 << 20


class Job:
    """In the place of the reaper: whether somebody looks after dead nodes."""

    def __init__(self):
        self.started = False

    def start(self):
        self.started = True

    def close(self):
        self.started = False


class Session(BlockSession):
    """One with an index of this process."""

    def _open_index(self, url):
        return OpenedIndex(MemoryIndex(), str(url), None)

    def _new_reaper(self):
        return Job()


@pytest.fixture
def made(tmp_path):
    sessions = []

    def make(**settings):
        sessions.append(Session("redis://127.0.0.1:1", run_dir=tmp_path, **settings))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def without(name):
    return [one for one in TRANSPORTS if one != name]


def test_settings_are_checked_before_anything_is_made(made):
    with pytest.raises(UsageError, match="verify"):
        made(verify="sometimes")


def test_limits_are_those_given_or_else_those_of_the_operator(made):
    given = Limits(redis_timeout_s=0.123)
    assert made(limits=given).limits is given
    assert made().limits == read_config().limits()


def test_a_new_session_has_viewed_nothing_and_is_looked_after(made):
    session = made()
    assert session.viewed == {"hits": 0, "hit_bytes": 0}
    assert session._reaper.started


def test_segments_of_this_host_are_mapped_unless_shm_is_not_among_the_transports(made):
    here, elsewhere = made(), made(transports=without(SHM))
    assert [session.nodes._use for session in (here, elsewhere)] == [True, False]


def test_streams_are_protected_as_given_or_else_as_the_environment_says(made, monkeypatch):
    monkeypatch.setenv("KVSTORE_SECRET", "short")
    with pytest.raises(UsageError, match="KVSTORE_SECRET"):
        made()
    made(security=StreamSecurity(secret=b"s" * 32))


def test_checksums_are_written_where_each_read_is_verified(made):
    always, seldom = made(verify="always"), made()
    assert [session.writer._checksums for session in (always, seldom)] == [True, False]


def test_vram_is_read_by_who_has_a_device_or_knows_who_has_one(made):
    for session in (made(device=DEVICE), made(sees_vram=lambda node_id, epoch: True)):
        assert session.remote.vram is not None
    assert made().remote.vram is None
    elsewhere = without(CUDA_IPC)
    assert made(device=DEVICE, transports=elsewhere).remote.vram is None
    assert made(transports=elsewhere).remote.vram is None


def test_vram_is_verified_where_each_read_is(made):
    assert made(device=DEVICE, verify="always").remote.vram.transport.checksums is not None
    assert made(device=DEVICE).remote.vram.transport.checksums is None


def test_an_embedded_node_is_started_only_without_a_url_or_a_name_and_with_a_size(
    made, monkeypatch
):
    started = []
    monkeypatch.setattr(
        embedded_node, "start_embedded_node", lambda run_dir, **how: started.append((run_dir, how))
    )
    session = made()
    starter = session._node_starter
    assert starter("kv:t", None, SIZE_BYTES, b"key") is None
    session.embedded = True
    assert starter("kv:t", None, None, b"key") is None
    assert starter("kv:t", "a name", SIZE_BYTES, b"key") is None
    starter("kv:t", None, SIZE_BYTES, b"key")()
    how = {"key_prefix": "kv:t", "size_bytes": SIZE_BYTES, "signing_key": b"key"}
    assert started == [(session.run_dir, how)]
