"""Finds the nodes of this host that one client writes to, connects to them and lets them go."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.client.local.link import NodeLink
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.local.touched import Touched
from kvstore.client.local.writer import NODE_SEARCH_S, Writer, nobody_here
from kvstore.errors import (
    DeadlineError,
    IndexUnavailableError,
    NodeUnavailableError,
    NoSpaceError,
    PeerError,
)
from kvstore.limits import FIRST_NODE_WAIT_S, FIRST_QUESTION_WAIT_S
from kvstore.nodedir import Announcement, NodeDir
from kvstore.system.fork import in_each_child

ROUNDS = 3
"""What was meant for a node that turns out to be gone, or hangs, is asked of others: this many
nodes in all."""
START_AGAIN_AFTER_S = 5.0
"""After an embedded node could not be started."""
POLL_S = 0.01
LOOK_AROUND_S = 0.5
"""How often nodes are looked for that were not there before."""


class HostWriters:
    """The writers of one client, one for each node of this host. Thread-safe.

    Finds nodes when they are first needed, and others when one is gone. Calls raise
    `NodeUnavailableError` when there is no node on this host.
    """

    def __init__(
        self,
        nodes: LocalNodes,
        *,
        name: str | None,
        timeout_s: float,
        checksums: bool,
        start_node: Callable[[], None] | None,
    ) -> None:
        """With `name`, only that node is saved to. `start_node` makes one where there is none."""
        self.introductions: dict[int, bytes] = {}
        """Fields of the namespaces that this client saves to, by id."""
        self._nodes = nodes
        self.machine = nodes.machine
        self._now = self.machine.monotonic
        self._name = name
        self.timeout_s = timeout_s
        self._checksums = checksums
        self._start_node = start_node
        self._patient = True
        self._first_wait_s = FIRST_QUESTION_WAIT_S if start_node is None else FIRST_NODE_WAIT_S
        # A handler of signals may close the client at any moment.
        self._lock = self.machine.lock()
        in_each_child(self)
        self._closed = False
        self._by_name: dict[str, Writer] = {}
        """Also of nodes that are gone, while something of theirs is in somebody's hands."""
        self._found: tuple[Writer, ...] = ()
        self._look_at = 0.0
        self._search_at = {False: 0.0, True: 0.0}
        """When who saves, and who only tells nodes something, looks for a node again where there
        was none: telling (connectors do it at their start) holds back no save."""
        self._found_none_because = nobody_here(None)
        """What the last search in vain said."""
        self._not_started: PeerError | None = None
        """Why the embedded node could not be started the last time."""
        self._start_at = 0.0
        self._free: dict[NodeLink, int] = {}
        """Bytes of room that nodes said they have, less what was sent there since."""
        self._free_until = 0.0
        self._touched = Touched()
        """Used since nodes were told."""
        self._touched_at = 0.0

    def writers(self, *, start: bool = False) -> tuple[Writer, ...]:
        """Return one for each living node of this index on this host, by name: at least one.

        With `start`, the embedded node is started when this client may do that.
        """
        found = self._known()
        if found:
            return found
        with self._lock:
            if self._closed:
                raise NodeUnavailableError("this client is closed")
            return self._unless_closed(self._known() or self._look(start))

    def _unless_closed(self, found: tuple[Writer, ...]) -> tuple[Writer, ...]:
        """Return what was just found; a handler of signals may have closed this meanwhile."""
        if self._closed:
            self.close()
            raise NodeUnavailableError("this client is closed")
        return found

    def _known(self) -> tuple[Writer, ...]:
        """Empty when it is time to look around, and when a node has gone."""
        if self._now() < self._look_at and all(w.linked is not None for w in self._found):
            return self._found
        return ()

    def _look(self, start: bool) -> tuple[Writer, ...]:
        now = self._now()
        if now < self._search_at[start]:
            raise NodeUnavailableError(self._found_none_because)
        try:
            words = self._writables(start)
            if start and self._start_node is not None and all(map(_is_ending, words)):
                self._start(self._start_node)
                words = self._writables(start)
        except IndexUnavailableError as e:
            failure = NodeUnavailableError(f"no memory node: the index cannot be asked ({e})")
            self._found_none(start, failure)
            raise failure from e
        joined: list[Writer] = []
        failure = NodeUnavailableError(nobody_here(None))
        for announcement, directory in words:
            writer = self._by_name.get(announcement.name) or self._new(announcement.name)
            try:
                writer.join(announcement, directory)
            except NodeUnavailableError as e:
                failure = e
            else:
                joined.append(writer)
        if not joined:
            others = [f"node {word.name}: {why}" for word, why in self._nodes.others()]
            others += map(str, self._nodes.strangers())
            failure = NodeUnavailableError("; ".join([str(failure), *others]))
        joined += [w for w in self._found if w not in joined and self._lives(w)]
        self._found = tuple(joined)
        self._forget_gone()
        if not joined:
            self._found_none(start, failure)
            raise failure
        self._look_at = now + LOOK_AROUND_S
        return self._found

    def _found_none(self, start: bool, failure: NodeUnavailableError) -> None:
        self._found_none_because = str(failure)
        search_at = self._now() + NODE_SEARCH_S
        self._search_at = {False: search_at, True: search_at if start else self._search_at[True]}

    def _start(self, start_node: Callable[[], None]) -> None:
        """Start a node, unless that failed lately: each try may cost a process."""
        now = self._now()
        if self._not_started is None or now >= self._start_at:
            self._not_started = None
            try:
                start_node()
            except (NodeUnavailableError, DeadlineError, NoSpaceError) as e:
                self._not_started, self._start_at = e, self._now() + START_AGAIN_AFTER_S
        if self._not_started is not None:
            raise NodeUnavailableError(str(self._not_started)) from self._not_started

    def _writables(self, start: bool) -> list[tuple[Announcement, NodeDir]]:
        """The first save waits for an index that is slow to say whose the nodes are: where one
        client starts many do, perhaps with their node and its Redis, and the machine is busy."""
        wait_s = self._first_wait_s if start and self._patient else 0.0
        give_up_at = self._now() + wait_s
        while True:
            try:
                found = self._nodes.writables()
            except IndexUnavailableError:
                if self._now() >= give_up_at:
                    self._patient = self._patient and not start
                    raise
                self.machine.sleep(POLL_S)
            else:
                self._patient = self._patient and not found
                return found

    def _new(self, name: str) -> Writer:
        writer = self._by_name[name] = Writer(
            self._nodes,
            name=name,
            timeout_s=self.timeout_s,
            checksums=self._checksums,
            introductions=self.introductions,
        )
        return writer

    @staticmethod
    def _lives(writer: Writer) -> bool:
        """Believed where nobody can look: no file descriptor is left, say."""
        writer.let_go()
        return writer.linked is not None

    def _forget_gone(self) -> None:
        for name, writer in list(self._by_name.items()):
            if writer not in self._found:
                writer.let_go()
                if not writer.links():
                    del self._by_name[name]
                    writer.close()

    def _targets(self, *, start: bool = False) -> list[tuple[Writer, NodeLink]]:
        """Return those that may be saved to."""
        found = [
            (writer, link)
            for writer in self.writers(start=start)
            if (link := writer.linked) is not None and self._name in (None, link.announcement.name)
        ]
        if not found:
            raise NodeUnavailableError(nobody_here(self._name))
        return found

    def each_s(self) -> float:
        """Return how long a request to save may take, so that there is time to ask another node."""
        if len(self._found) == 1:
            return self.timeout_s
        links = [w.linked for w in self._found if w.linked is not None]
        healthy = sum(
            self._name in (None, link.announcement.name) and not link.control.silent
            for link in links
        )
        return self.timeout_s / max(1, min(ROUNDS, healthy))

    def link(self, *, start: bool = True) -> NodeLink:
        """Return the link to one of the nodes that may be saved to."""
        return self._targets(start=start)[0][1]

    def no_node(self) -> NodeUnavailableError | None:
        """Return why nothing can be saved on this host; None while there is a node."""
        try:
            self._targets(start=True)
        except NodeUnavailableError as e:
            return e
        return None

    def links(self) -> list[NodeLink]:
        """Return all links, those to nodes that are gone too while something is held there."""
        return [link for writer in self._every() for link in writer.links()]

    def _every(self) -> list[Writer]:
        return list(self._by_name.values())

    def let_go(self) -> None:
        """Unmap nodes that died; whoever only saves finds out at the next save otherwise. Give back
        to the others what nobody has any more."""
        for writer in self._every():
            writer.let_go()
            writer.tidy()

    def _of(self, node_id: int) -> Writer | None:
        """That of a node, whichever of its starts."""
        for writer in self._every():
            if any(link.announcement.node_id == node_id for link in writer.links()):
                return writer
        return None

    def after_fork_in_child(self) -> None:
        self._lock = self.machine.lock()  # a thread of the parent may have had it

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._found = ()
        for writer in self._every():
            writer.close()


def _is_ending(node: tuple[Announcement, NodeDir]) -> bool:
    """Return whether the node has unlinked its socket, as it does first; its announcement goes
    last."""
    return not node[1].socket.exists()
