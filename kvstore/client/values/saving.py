"""Saves values of callers to nodes of this host or another, and says what was there already.

What becomes of the bytes on the way is put_pipeline.py's business, on this host, and
nodes/saving/remote_writer.py's where there is no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.client.payloads.tensors import Payload
from kvstore.client.session import BlockSession
from kvstore.client.values.existing import others_elsewhere, told_apart
from kvstore.client.values.put_pipeline import check_wanted, save
from kvstore.errors import NodeUnavailableError, NoSpaceError, PeerError
from kvstore.limits import REPLACE_TRIES
from kvstore.transport.stream.requests import SavePayload
from kvstore.types import EXISTS, Key, Location, PutResult, PutStatus, rejected

DROP_PART_S_MIN = 0.1
"""What a node of another host has to say that it dropped a value, while there is time left."""


class ValueSaver:
    """Puts, replaces and deletes under keys of one namespace. Thread-safe."""

    def __init__(self, session: BlockSession, namespace_id: int) -> None:
        """`session` is its caller's, who closes it, and has told it of the namespace."""
        self._session = session
        self._now = session.machine.monotonic
        self._reader = session.reader
        self._writer = session.writer
        self._namespace_id = namespace_id

    def put(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> list[PutResult]:
        """Save what is not there; DIFFERS where another value is. To find that out takes what is
        left of the time that saving may take."""
        began = self._now()
        results = self.save(keys, payloads)
        if EXISTS not in results:
            return results
        return self._told_apart(keys, payloads, results, began + self._timeout_s(payloads))

    def _timeout_s(self, payloads: Sequence[Payload]) -> float:
        remote, here_s = self._session.remote, self._writer.timeout_s
        return max(here_s, remote.timeout_s(sum(payload.size_bytes for payload in payloads)))

    def _told_apart(
        self,
        keys: Sequence[Key],
        payloads: Sequence[Payload],
        results: Sequence[PutResult],
        give_up_at: float,
    ) -> list[PutResult]:
        remote = self._session.remote
        return told_apart(self._reader, remote, keys, payloads, results, give_up_at)

    def replace(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> list[PutResult]:
        """`put` in place of other values; of several for one key the last counts."""
        last = dict(zip(keys, payloads, strict=True))
        results: dict[Key, PutResult] = {}
        todo = list(last)
        give_up_at = self._now() + self._timeout_s(payloads)
        for _ in range(REPLACE_TRIES):
            # Elsewhere too: whoever reads there would go on finding the old one.
            remote = self._reader.search(todo).remote
            blocks = [(todo[i], at, last[todo[i]]) for i, at in remote.items()]
            is_other = others_elsewhere(self._session.remote, blocks, give_up_at)
            others = {
                key: at for (key, at, _), other in zip(blocks, is_other, strict=True) if other
            }
            undropped = self._drop_each(others)
            todo = [key for key in todo if key not in undropped]
            results.update(undropped)
            values = [last[key] for key in todo]
            told = self._told_apart(todo, values, self.save(todo, values), give_up_at)
            results.update(zip(todo, told, strict=True))
            todo = [key for key in todo if results[key].status is PutStatus.DIFFERS]
            undropped = self._drop_each(dict.fromkeys(todo))
            results.update(undropped)
            todo = [key for key in todo if key not in undropped]
            if not todo:
                break
        return [results[key] for key in keys]

    def save(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> list[PutResult]:
        """Save what is not there, whatever is.

        Raises `NoSpaceError` where the node that this client is to start finds no room.
        """
        checksums = self._session.verify == "always"
        try:
            return save(self._writer, self._namespace_id, keys, payloads, checksums=checksums)
        except NodeUnavailableError as e:
            if isinstance(e.__cause__, NoSpaceError):
                # Nobody else will say it: this client was to start the node.
                raise NoSpaceError(str(e)) from e
            no_node = str(e)
        return self._save_remotely(keys, payloads, no_node)

    def _drop_each(self, there: Mapping[Key, Location | None]) -> dict[Key, PutResult]:
        """Return why it could not be done, of those that could not be dropped where they are."""
        undropped: dict[Key, PutResult] = {}
        nodes = {location.node_id for location in there.values() if location is not None}
        left_s = self._session.remote.timeout_s(0)
        """One deadline for all nodes of other hosts that are silent: each takes its part of it."""
        for key, location in there.items():
            began = self._now()
            try:
                if location is None:
                    self._session.drop([key])
                else:
                    self._reader.forget(key)
                    part_s = max(left_s / max(len(nodes), 1), min(left_s, DROP_PART_S_MIN))
                    self._session.remote.drop(key, location, began + part_s)
            except PeerError as e:
                if location is not None:
                    nodes.discard(location.node_id)
                    left_s = max(left_s - (self._now() - began), 0.0)
                undropped[key] = rejected(f"the value that is there cannot be dropped: {e}")
        return undropped

    def _save_remotely(
        self, keys: Sequence[Key], payloads: Sequence[Payload], here: str
    ) -> list[PutResult]:
        """To another host's node; `here` says why not to this one's."""
        check_wanted()
        values = [
            SavePayload(key, (p.data, memoryview(p.meta)), p.kind, len(p.meta))
            for key, p in zip(keys, payloads, strict=True)
        ]
        try:
            return self._session.remote_writer.save(values, self._namespace_id)
        except PeerError as e:
            return [rejected(f"{here}; elsewhere: {e}")] * len(keys)
