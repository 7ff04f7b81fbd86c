"""Where the secret of streams comes from."""

import os

import pytest

from kvstore.errors import UsageError
from kvstore.transport.stream.security import StreamSecurity

SECRET = "a secret that both sides know"


@pytest.fixture
def given(monkeypatch, tmp_path):
    """The secret of a process with these variables; with `file`, in one of this mode."""

    def given(text=None, *, file=None, mode=0o600):
        for name in ("KVSTORE_SECRET", "KVSTORE_SECRET_FILE"):
            monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setitem(os.environ, "KVSTORE_SECRET", text)
        if file is not None:
            path = tmp_path / "secret"
            path.write_text(file)
            path.chmod(mode)
            monkeypatch.setenv("KVSTORE_SECRET_FILE", str(path))
        return StreamSecurity.from_environment().secret

    return given


def test_the_same_secret_is_the_same_in_a_variable_and_in_a_file(given):
    """Whatever wrote them may have ended the line."""
    assert given(SECRET) == given(SECRET + "\n") == given(file=SECRET + "\n") == SECRET.encode()
    assert given() is given("") is None


def test_a_secret_need_not_be_text(given):
    raw = bytes(range(128, 160))
    assert given(os.fsdecode(raw)) == raw


def test_a_file_that_others_may_read_is_refused(given):
    with pytest.raises(UsageError, match="others"):
        given(file=SECRET, mode=0o644)


@pytest.mark.parametrize("text", ["short", " " * 20, "x" * 4097])
def test_a_secret_of_another_length_is_refused_and_not_shown(given, text):
    with pytest.raises(UsageError, match="16 to 4096") as refused:
        given(text)
    assert text not in str(refused.value)
