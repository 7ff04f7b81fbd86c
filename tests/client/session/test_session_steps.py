"""Steps of a session without a node or an index: whose views they are, and what is counted."""

from types import SimpleNamespace

import pytest

from kvstore import UsageError
from kvstore.client.base import BlockRef
from kvstore.client.nodes.fetch import RemoteBlock
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.session import BlockSession
from kvstore.errors import IndexUnavailableError, NodeUnavailableError
from kvstore.protocol.control_requests import Wants
from kvstore.transport.registry import SHM, TRANSPORTS
from kvstore.types import Kind, Location

NOW = 100.0
HERE = SimpleNamespace(buffer=b"12345")


def key_of(number):
    return bytes([number]) * 32


def away(length, number=0):
    return RemoteBlock(key_of(number), Location(8, 1, 0, 3, 1, 0, length, 0))


class Reading:
    """In the place of the reader: what each key resolves to, and what was asked of it."""

    def __init__(self, refs, right=True):
        self.refs, self.right = refs, right
        self.reads, self.checked = [], 0

    def resolve(self, key, record):
        return self.refs[key[0]]

    def read(self, refs, into, deadline, rooms=None):
        self.reads.append((list(refs), into, deadline))
        self.rooms = rooms
        return [f"fetched {i}" for i in range(len(refs))]

    def verified(self, key, place):
        self.checked += 1
        return self.right


def session_of(refs, verify="never", right=True):
    session = object.__new__(BlockSession)
    session.reader = Reading(refs, right)
    session.verify = verify
    session.viewed = {"hits": 0, "hit_bytes": 0}
    session._now = lambda: NOW
    session.counted, session._told = {}, {}
    return session


def views(session, staging=None, timeout_s=None):
    found = [BlockRef(key_of(i), b"r") for i in range(len(session.reader.refs))]
    return list(session.views(found, staging, timeout_s))


def test_a_block_of_this_host_is_viewed_in_place_and_counted():
    session = session_of([HERE, None, HERE])
    assert views(session) == [HERE, None, HERE]
    assert session.viewed == {"hits": 2, "hit_bytes": 10}
    assert (session.reader.reads, session.reader.checked) == ([], 0)


def test_where_each_is_verified_a_damaged_one_is_a_miss():
    assert views(session_of([HERE, None], "always")) == [HERE, None]
    session = session_of([HERE, None], "always", right=False)
    assert views(session) == [None, None]
    assert session.viewed["hits"] == 0


def test_those_of_other_hosts_are_read_together_by_the_deadline():
    refs = [away(3), HERE, away(4)]
    session = session_of(refs)
    assert views(session, timeout_s=5.0) == ["fetched 0", HERE, "fetched 2"]
    assert session.reader.reads == [(refs, None, NOW + 5)]
    assert session.viewed["hits"] == 1
    session = session_of(refs)
    views(session)
    assert session.reader.reads == [(refs, None, None)]


def test_room_is_given_to_those_of_other_hosts_in_turn_until_there_is_none():
    session = session_of([away(3), HERE, away(4), away(2), away(1)])
    staging = memoryview(bytearray(8))
    assert views(session, staging) == ["fetched 0", HERE, "fetched 2", None, "fetched 4"]
    ((_, into, _),) = session.reader.reads
    for i, out in enumerate(into):
        if out is not None:
            out.room[:] = bytes([i]) * len(out.room)
    assert list(staging) == [0] * 3 + [2] * 4 + [4]


def test_a_pin_that_the_node_has_not_granted_is_none():
    session = session_of([])
    session.writer = SimpleNamespace(pin_many=lambda keys: [b"record", None])
    keys = [key_of(0), key_of(1)]
    assert session.pin(keys) == [BlockRef(keys[0], b"record"), None]


def test_what_is_retained_has_a_time_to_live_from_none_on():
    session = session_of([])
    asked = []
    session.writer = SimpleNamespace(retain=lambda *all_of_it: asked.append(all_of_it) or [])
    session.retain([key_of(0)], 0)
    assert len(asked) == 1
    for wrong in (-1, 1 << 62):
        with pytest.raises(UsageError, match="for_s"):
            session.retain([key_of(0)], wrong)
    session.retain([], 0)
    assert len(asked) == 1


def test_read_bytes_are_told_of_each_transport_that_has_counted_some():
    session = session_of([])
    session.viewed["hit_bytes"] = 7
    other = next(name for name, row in TRANSPORTS.items() if row.file)
    vram = SimpleNamespace(counts={"cuda_ipc_bytes": 3})
    session.remote = object.__new__(RemoteNodes)
    session.remote.counts, session.remote.vram = {f"{other}_bytes": 5, "else": 1}, vram
    assert session.read_bytes() == {SHM: 7, other: 5, "cuda_ipc": 3}


class Pages:
    """In the place of a mapped segment."""

    def __init__(self, node_id):
        self.superblock = SimpleNamespace(node_id=node_id, epoch=1)
        self.payload = memoryview(bytearray(4))


def test_mappings_are_those_written_through_and_those_read():
    links = [
        None,
        SimpleNamespace(memory=SimpleNamespace(shm=None)),
        SimpleNamespace(memory=SimpleNamespace(shm=Pages(2))),
    ]
    session = session_of([])
    writers = [SimpleNamespace(linked=link) for link in links]
    session.writer = SimpleNamespace(writers=lambda: writers)
    session.nodes = SimpleNamespace(mapped=[SimpleNamespace(shm=Pages(3))])
    assert [(m.node_id, m.writable) for m in session.mappings()] == [(2, True), (3, False)]


def test_a_segment_that_is_closed_meanwhile_is_no_mapping():
    closed = Pages(3)
    closed.payload.release()
    session = session_of([])
    session.writer = SimpleNamespace(writers=tuple)
    session.nodes = SimpleNamespace(mapped=[SimpleNamespace(shm=closed)])
    assert session.mappings() == []


NO_NODE = NodeUnavailableError("none here")


def no_node(*_):
    raise NO_NODE


def test_saves_go_elsewhere_only_where_there_is_no_node_here():
    session = session_of([])
    session.remote_writer = SimpleNamespace(reserve=lambda *_: ["elsewhere"])
    session.writer = SimpleNamespace(no_node=lambda: NO_NODE, reserve=no_node)
    assert session.reserve([key_of(0)], 5, 1) == ["elsewhere"]
    session.writer = SimpleNamespace(no_node=lambda: None, reserve=no_node)
    with pytest.raises(NodeUnavailableError, match="none here"):
        session.reserve([key_of(0)], 5, 1)


def test_who_saves_looks_for_nodes_once():
    session, wants = session_of([]), []
    session.writer = SimpleNamespace(reserve=lambda asked, _: wants.append(asked) or ["here"])
    assert session.reserve([key_of(0)], 5, 1) == ["here"]
    assert wants == [Wants([key_of(0)], 5, Kind.BLOCK, 0, None, 0)]


def test_where_no_host_takes_a_save_both_reasons_are_told():
    session = session_of([])

    def full(*_):
        raise NodeUnavailableError("all full")

    session.writer = SimpleNamespace(no_node=lambda: NO_NODE, reserve=no_node)
    session.remote_writer = SimpleNamespace(reserve=full)
    with pytest.raises(NodeUnavailableError, match="none here; elsewhere: all full"):
        session.reserve([key_of(0)], 5, 1)


class Saver:
    """In the place of who granted reservations: what was given back."""

    def __init__(self):
        self.given_back = []

    def abort(self, reservations):
        self.given_back += reservations


class Told:
    """In the place of any part: what was asked of it, in turn."""

    def __init__(self, name, log):
        self._name, self._log = name, log

    def __getattr__(self, method):
        def told(*given, **named):
            self._log.append((f"{self._name}.{method}", *given, *named.values()))

        return told


def with_parts(log, *names):
    """A session whose parts of these names only note what is asked of them."""
    session = session_of([])
    for name in names:
        setattr(session, name, Told(name.strip("_"), log))
    return session


def test_what_is_aborted_goes_back_to_who_granted_it():
    session, saver = session_of([]), Saver()
    session.limits = SimpleNamespace(request_timeout_s=5.0)
    reservation = SimpleNamespace(saver=saver)
    session.abort([reservation])
    assert saver.given_back == [reservation]


def test_touches_unpins_and_namespaces_reach_the_nodes_of_this_host():
    log = []
    session = with_parts(log, "writer")
    session.touch([key_of(0)])
    session.unpin([BlockRef(key_of(1), b"r")])
    session.register_namespaces(["a namespace"])
    assert log == [
        ("writer.touch", [key_of(0)], NOW, False, False),
        ("writer.unpin_many", [(key_of(1), b"r")]),
        ("writer.register_namespaces", ["a namespace"]),
    ]


LOOKED_AFTER = [
    ("watch.look", NOW),
    ("nodes.check", NOW),
    ("reader.let_go",),
    ("writer.let_go",),
    ("value_names.tell",),
    ("remote.look_after",),
]


def looked_after(due):
    log = []
    session = with_parts(log, "_watch", "nodes", "reader", "writer", "value_names", "remote")
    session._sweeper = SimpleNamespace(
        due=lambda now: due and now == NOW, sweep=lambda: log.append(("swept",))
    )
    session._look_after()
    return log


def test_all_that_may_hold_something_of_dead_nodes_is_looked_after():
    assert looked_after(due=False) == LOOKED_AFTER
    assert looked_after(due=True) == [*LOOKED_AFTER, ("swept",)]


def test_an_index_that_cannot_be_asked_is_named_by_health_and_nodes_are_asked_all_the_same():
    session = session_of([])
    session.writer = SimpleNamespace(health=lambda: ({"n": ""}, {}))

    def refused():
        raise IndexUnavailableError("away")

    session.index = SimpleNamespace(ping=refused)
    health = session.health()
    assert (health.index, health.nodes) == ("away", {"n": ""})
    session.index = SimpleNamespace(ping=lambda: None, lookup=lambda keys: [None])
    assert session.health()


def test_a_close_ends_each_part_what_saves_before_what_it_saves_through():
    log = []
    parts = ("_watch", "_reaper", "_explainer", "value_names", "writer", "reader", "remote")
    with_parts(log, *parts, "_landing", "nodes", "_opened").close()
    assert [word for (word,) in log] == [
        *("watch.close", "reaper.close", "explainer.close", "value_names.tell"),
        *(
            "writer.links",
            "writer.close",
            "reader.close",
            "remote.close",
            "landing.close",
            "nodes.close",
            "opened.close",
        ),
    ]
