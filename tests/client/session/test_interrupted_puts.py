"""A handler of signals that raises in a put, when what is reserved has been written."""

import pytest

from kvstore.client.local.control import ControlChannel
from kvstore.client.local.writer import Writer
from kvstore.protocol.control import Op


@pytest.mark.parametrize("when", ["before the commit", "in the commit"])
def test_who_is_interrupted_when_all_is_copied_gives_its_slots_back(client, monkeypatch, when):
    post = Writer._post

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    def interrupted_in_commit(self, link, op, *args, **kwargs):
        if op is Op.COMMIT:
            raise KeyboardInterrupt
        return post(self, link, op, *args, **kwargs)

    with monkeypatch.context() as patched:
        if when == "before the commit":
            patched.setattr(Writer, "commit_later", interrupted)
        else:
            patched.setattr(Writer, "_post", interrupted_in_commit)
        with pytest.raises(KeyboardInterrupt):
            client.put("k", bytes(100_000))
    assert client.stats()["node"]["reserved"] == 0
    assert client.put("k", bytes(100_000))


def test_slots_whose_answer_was_not_read_are_given_back_with_the_next_request(client, monkeypatch):
    client.put("j", b"")

    def interrupted(self, ticket):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ControlChannel, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.put("k", bytes(100_000))
    assert client.stats()["node"]["reserved"] == 0
    assert client.put("k", bytes(100_000))


def test_who_is_interrupted_while_an_answer_is_taken_holds_nothing_of_it(client, monkeypatch):
    client.put("j", b"")
    key = client.namespace.value_key("k")

    def interrupted(self, *args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "_granted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.session.reserve([key], 100_000, client.namespace.id)
    assert client.stats()["node"]["reserved"] == 0
    assert client.put("k", bytes(100_000))
