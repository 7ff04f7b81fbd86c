"""Secrets come from an argument, a variable or a file; no message shows one."""

from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.limits import SECRET_BYTES_MAX
from kvstore.secret import SALT, SIGNING_KEY, secret, tenant_salt

WORD = "sixteen or more characters"


def test_the_argument_wins_then_the_variable_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secret(SIGNING_KEY) is None
    file = tmp_path / "key"
    file.write_text(f"  {WORD} (file)\n")
    file.chmod(0o640)
    monkeypatch.setenv("KVSTORE_SIGNING_KEY_FILE", str(file))
    assert secret(SIGNING_KEY) == f"{WORD} (file)".encode()
    monkeypatch.setenv("KVSTORE_SIGNING_KEY", f"{WORD} (variable)")
    assert secret(SIGNING_KEY) == f"{WORD} (variable)".encode()
    assert secret(SIGNING_KEY, f"{WORD} (argument)") == f"{WORD} (argument)".encode()
    assert secret(SIGNING_KEY, b"\xff" * 20) == b"\xff" * 20


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SALT", "")
    assert tenant_salt() == b""


@pytest.mark.parametrize("word", ["short-s3cret", "s3cret" * SECRET_BYTES_MAX])
def test_one_of_a_wrong_size_is_refused_and_not_shown(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_SALT", word)
    with pytest.raises(UsageError, match="KVSTORE_SALT=") as raised:
        secret(SALT)
    assert "s3cret" not in str(raised.value)
    with pytest.raises(UsageError, match="salt="):
        secret(SALT, word)


def test_a_file_that_others_can_read_or_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    monkeypatch.setenv("KVSTORE_SALT_FILE", str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        secret(SALT)
    file.write_text(WORD)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        secret(SALT)
