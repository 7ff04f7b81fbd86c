"""A handler of signals that raises in a put, when what is reserved has been written."""

import pytest
from stores import node_stats

from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.saving.link import NodeLink
from kvstore.protocol.control import Op


@pytest.mark.parametrize("when", ["before the commit", "in the commit"])
def test_who_is_interrupted_when_all_is_copied_gives_its_slots_back(client, monkeypatch, when):
    post = ControlChannel.post

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    def interrupted_in_commit(self, op, *args, **kwargs):
        if op is Op.COMMIT:
            raise KeyboardInterrupt
        return post(self, op, *args, **kwargs)

    with monkeypatch.context() as patched:
        if when == "before the commit":
            patched.setattr(NodeLink, "commit_later", interrupted)
        else:
            patched.setattr(ControlChannel, "post", interrupted_in_commit)
        with pytest.raises(KeyboardInterrupt):
            client.put("k", bytes(100_000))
    assert node_stats(client)["reserved"] == 0
    assert client.put("k", bytes(100_000))


def test_slots_whose_answer_was_not_read_are_given_back_with_the_next_request(client, monkeypatch):
    client.put("j", b"")

    def interrupted(self, ticket):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ControlChannel, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.put("k", bytes(100_000))
    assert node_stats(client)["reserved"] == 0
    assert client.put("k", bytes(100_000))


def test_who_is_interrupted_while_an_answer_is_taken_holds_nothing_of_it(client, monkeypatch):
    client.put("j", b"")
    key = client.namespace.value_key("k")

    def interrupted(self, *args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NodeLink, "_granted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.session.reserve([key], 100_000, client.namespace.id)
    assert node_stats(client)["reserved"] == 0
    assert client.put("k", bytes(100_000))
