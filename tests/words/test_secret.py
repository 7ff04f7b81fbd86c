"""Secrets come from an argument, a variable or a file; no message shows one."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.limits import SECRET_BYTES_MAX
from kvstore.secret import SALT, SIGNING_KEY, disk_keys, secret, tenant_salt

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


ONE, TWO = "ab" * 32, "CD" * 32


def keys_in(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    path.write_text(text)
    path.chmod(0o600)
    monkeypatch.setenv("KVSTORE_DISK_KEYS_FILE", str(path))
    return disk_keys()


def test_keys_of_disks_are_lines_of_a_file_and_their_ids_follow_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_keys() == {}
    both = keys_in(tmp_path / "keys", f"{ONE}\n{TWO}\n", monkeypatch)
    assert list(both.values()) == [bytes.fromhex(ONE), bytes.fromhex(TWO)]
    turned = keys_in(tmp_path / "keys", f"\n{TWO}\n\n{ONE}", monkeypatch)
    assert turned == both
    assert list(turned) == list(both)[::-1]
    assert all(len(key_id) == 8 and key_id not in key for key_id, key in both.items())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "1 to 16 different keys"),
        (f"{ONE}\n{ONE}", "different"),
        ("\n".join(f"{number:064x}" for number in range(17)), "it has 17"),
        (f"{ONE}\n{TWO[:-1]}", "key 2.*64 hexadecimal digits"),
        (ONE + "00", "key 1.*openssl rand -hex 32"),
        ("zz" * 32, "hexadecimal"),
        (f"{ONE[:-1]}é", "hexadecimal"),
    ],
)
def test_a_file_of_disk_keys_that_is_not_one_is_refused_and_not_shown(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"disk_keys_file=.*{why}") as raised:
        keys_in(tmp_path / "keys", text, monkeypatch)
    assert ONE[:8] not in str(raised.value)


def test_keys_of_disks_in_a_variable_or_for_all_to_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_in(tmp_path / "keys", ONE, monkeypatch)
    (tmp_path / "keys").chmod(0o604)
    with pytest.raises(UsageError, match="others may read"):
        disk_keys()
    monkeypatch.setenv("KVSTORE_DISK_KEYS", ONE)
    with pytest.raises(UsageError, match="KVSTORE_DISK_KEYS_FILE") as raised:
        disk_keys()
    assert ONE not in str(raised.value)


def test_without_the_extra_keys_of_disks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cryptography", "cryptography.hazmat.primitives.ciphers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert disk_keys() == {}
    with pytest.raises(UsageError, match=r"pip install 'kvstore-llm\[crypto\]'"):
        keys_in(tmp_path / "keys", ONE, monkeypatch)


def test_the_library_imports_no_cryptography() -> None:
    code = (
        "import kvstore, kvstore.cli, kvstore.segment.disk.attached, kvstore.node.disk.disks, sys"
    )
    found = [sys.executable, "-c", code + "; print('cryptography' in sys.modules)"]
    assert subprocess.run(found, capture_output=True, text=True).stdout == "False\n"
