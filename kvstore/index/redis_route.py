"""Which server answers: the one, or the master that Sentinel names (redis_cluster.py: shards)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvstore.index.redis_link import Links, Reply


class Request(NamedTuple):
    """One command with one reply."""

    packed: bytes
    slot: int = -1
    """Cluster slot of its keys; -1 where there is no cluster."""


class Shard(NamedTuple):
    links: Links
    slots: tuple[int, ...]
    """The slots it serves; empty where there is no cluster."""


class Route(Protocol):
    """Sends commands to where their keys are."""

    clustered: bool

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """All replies in order, within one time-out; error replies are values.

        `LostReply` stands for those of a shard that is away; raises when none is there.
        """
        ...

    def run_each(self, requests: Iterator[Request]) -> list[Reply]:
        """As `run`; where one server gets them all, it works on the first while the next is
        made."""
        ...

    def ask_all(
        self, request: Callable[[Shard], bytes], replies: int, *, even_if_away: bool = False
    ) -> list[list[Reply]]:
        """`replies` replies of every server that holds keys, in the order of `shards`.

        `LostReply` as in `run`. With `even_if_away` a shard that failed lately is asked
        all the same.
        """
        ...

    def links_for(self, slot: int) -> Links:
        """The connections for several round trips with one server."""
        ...

    def shards(self) -> list[Shard]:
        """Every server that holds keys, in a stable order."""
        ...

    def mistaken(self) -> None:
        """The server is not the one for us (READONLY): find out anew at the next call."""
        ...

    def close(self) -> None: ...


class SingleRoute:
    """One server for everything."""

    clustered = False

    def __init__(self, links: Links) -> None:
        self._links = links

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        if len(requests) == 1:
            return self._links.run(requests[0].packed)
        return self._links.run(b"".join([r.packed for r in requests]), len(requests))

    def run_each(self, requests: Iterator[Request]) -> list[Reply]:
        return self._links.run_each(request.packed for request in requests)

    def ask_all(
        self, request: Callable[[Shard], bytes], replies: int, *, even_if_away: bool = False
    ) -> list[list[Reply]]:
        return [self._links.run(request(Shard(self._links, ())), replies)]

    def links_for(self, slot: int) -> Links:
        return self._links

    def shards(self) -> list[Shard]:
        return [Shard(self._links, ())]

    def mistaken(self) -> None:
        self._links.drop_idle()

    def close(self) -> None:
        self._links.close()
