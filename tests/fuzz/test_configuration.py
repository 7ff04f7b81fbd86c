"""Whatever stands in a setting, a URL, an argument or a node's word: used, refused or ignored."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest  # noqa: TC002  # as in every other test
from hypothesis import given
from hypothesis import strategies as st
from seeds import fuzz

from connector.settings import ConnectorSettings
from connector.transfer.config import KVTransferConfig
from kvstore.cli import COMMANDS, _parse
from kvstore.cli.commands.acl import _read_passwords
from kvstore.cli.commands.explain import _namespace, _tokens
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.core.namespaces import namespace_of
from kvstore.errors import KVStoreError, UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.acl import AclRole, acl_rules, check_user
from kvstore.index.redis.url import parse_url, redacted
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.node.config import NodeConfig
from kvstore.nodedir import Announcement, NodeDir
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.system.filelock import try_lock

SECRET = "s3cret"
DEEP = b"[" * 100_000
words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "\0", "..", "/", "-1", "1e999", "nan", "٣", "²", "\ud800", "9" * 5000]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
documents = st.one_of(
    st.binary(max_size=60),
    st.just(DEEP),
    values.map(lambda value: json.dumps(value).encode()),
)

WORD = Announcement(
    node_id=7, epoch=3, name="node", host="here", pid=1, key_prefix="kv:a",
    data_path="/nowhere", head_path="/nowhere", control_path="/nowhere",
    size_bytes=2 * 65536, inline_bytes=1024,
)  # fmt: skip
FIELDS = json.loads(WORD.pack())


@st.composite
def announcements(draw: st.DrawFn) -> bytes:
    """As it should be, but for some fields."""
    fields = dict(FIELDS)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        if draw(st.booleans()):
            fields[name] = draw(values)
        else:
            fields.pop(name, None)
    return json.dumps(fields).encode()


@fuzz(150)
@given(raw=st.one_of(documents, announcements()))
def test_any_bytes_are_an_announcement_or_none(raw: bytes) -> None:
    found = Announcement.unpack(raw)
    assert found is None or (type(found.node_id) is int and type(found.name) is str)


@fuzz(60)
@given(raw=st.one_of(documents, announcements()))
def test_any_node_json_is_a_node_or_nobody(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    """Also of a node that lives, and whose segment is there."""
    run_dir = tmp_path_factory.mktemp("run")
    directory = NodeDir(run_dir, "node")
    directory.path.mkdir(parents=True)
    assert try_lock(directory.lock) is not None
    segment = OwnedShm(run_dir / "s", Superblock(7, 3, 0, 131072))
    real = raw.replace(b'"data_path": "/nowhere"', f'"data_path": "{segment.data_path}"'.encode())
    real = real.replace(b'"head_path": "/nowhere"', f'"head_path": "{segment.head_path}"'.encode())
    directory.announcement_path.write_bytes(real)
    index = MemoryIndex()
    index.announce(7, real[: 16 << 10], 60)
    nodes = NodeDirectory(run_dir, index, "kv:a")
    attached = nodes.segment(7, 3, 0.0)
    assert attached is None or attached.announcement.epoch == 3
    found = nodes.writable(None)
    assert found is None or found[0].key_prefix == "kv:a"
    nodes.close()
    segment.close()


@fuzz(200)
@given(name=st.one_of(words, st.binary(max_size=5)))
def test_any_name_is_a_key_or_a_usage_error(name: str | bytes) -> None:
    try:
        assert len(Namespace.named("n").value_key(name)) == 32
    except UsageError:
        return


@fuzz(250)
@given(
    text=st.one_of(
        words,
        st.tuples(
            st.sampled_from(
                [*("redis", "rediss", "unix", "redis+sentinel", "rediss+cluster", "http", "")]
            ),
            st.text(alphabet="/:@?#[]%&=,.+abc019 \0é²", max_size=40),
        ).map("://".join),
        st.tuples(words, words, words, words).map(
            lambda w: "rediss://{}:{SECRET}@{}/{}?ssl_{}".format(*w, SECRET=SECRET)
        ),
    )
)
def test_any_text_is_a_target_or_a_usage_error_and_neither_shows_the_password(text: str) -> None:
    """A password such as "0" may well stand in a host's name: SECRET does not."""
    try:
        target = parse_url(text)
    except UsageError as error:
        shown = [str(error), redacted(text)]
    else:
        shown = [target.label, repr(target)]
    assert not any(SECRET in words for words in shown)


transfer = st.one_of(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(KVTransferConfig.__dataclass_fields__)), words),
        values,
        max_size=5,
    ),
    values,
)


@fuzz(150)
@given(given_=transfer, variables=st.dictionaries(words, words, max_size=3), raw=documents)
def test_any_transfer_config_is_used_or_refused(
    given_: object, variables: dict[str, str], raw: bytes
) -> None:
    text = raw.decode(errors="replace")
    named = {f"KVSTORE_{name}": announcement for name, announcement in variables.items()}
    if isinstance(given_, dict):
        named |= {f"KVSTORE_{str(k).upper()}": str(v) for k, v in given_.items()}
    for make in (
        lambda: KVTransferConfig.from_dict(given_),  # type: ignore[arg-type]
        lambda: KVTransferConfig.from_json(json.dumps(given_)),
        lambda: KVTransferConfig.from_json(text),
        lambda: KVTransferConfig.from_env(named),
        lambda: KVTransferConfig.from_env({"KVSTORE_KV_TRANSFER_CONFIG": text}),
    ):
        try:
            config = make()
        except UsageError:
            continue
        assert KVTransferConfig.from_dict(config.to_dict()) == config
        config.has_connector("KVStoreConnector")


@fuzz(150)
@given(
    extra=st.dictionaries(
        st.one_of(st.sampled_from(sorted(ConnectorSettings.__dataclass_fields__)), words),
        values,
        max_size=4,
    )
)
def test_any_connector_settings_are_used_or_refused(extra: dict[str, object]) -> None:
    try:
        ConnectorSettings.from_extra(extra)
    except UsageError:
        return


@fuzz(150)
@given(
    name=words, number=st.one_of(st.integers(), st.floats()), whole=st.integers(), data=st.data()
)
def test_any_limits_and_node_settings_are_used_or_refused(
    name: str, number: float, whole: int, data: st.DataObject
) -> None:
    field = data.draw(st.sampled_from(sorted(Limits.__dataclass_fields__)))
    for make in (
        lambda: Limits(**{field: number}),  # type: ignore[arg-type]
        lambda: NodeConfig(run_dir=Path("/nowhere"), size_bytes=whole).segment_bytes,
        lambda: NodeDir(Path("/nowhere"), name).announcement(),
        lambda: acl_rules(AclRole.NODE, name, None),
        lambda: check_user(name),
    ):
        with contextlib.suppress(UsageError):
            make()


@fuzz(150)
@given(raw=documents, fields=st.dictionaries(words, values, max_size=4))
def test_any_bytes_are_a_namespace_or_a_usage_error(raw: bytes, fields: dict[str, object]) -> None:
    for bytes_ in (raw, json.dumps(fields).encode()):
        try:
            found = namespace_of(bytes_)
        except UsageError:
            continue
        assert isinstance(found, Namespace)
        assert namespace_of(found.canonical()) == found


arguments = st.lists(
    st.one_of(
        words,
        st.sampled_from(
            [
                *("--json", "--size", "1MiB", "--tokens", "--key", "k", "--limit", "--group"),
                *("--namespace-fields", "{}", "--role", "client", "--format", "file", "-o"),
                *("--key-prefix", "--run-dir", "--url", "redis://h", "--nodes"),
            ]
        ),
    ),
    max_size=6,
)


@fuzz(200)
@given(command=st.sampled_from([*COMMANDS, "", "--version"]), args=arguments)
def test_any_arguments_are_parsed_or_refused_with_a_line(command: str, args: list[str]) -> None:
    said = io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")  # as Python opens stderr
    code = None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            assert callable(_parse([command, *args]).run)
        except SystemExit as e:
            code = e.code
    assert code in (None, 0, 2)


@fuzz(100)
@given(raw=documents, text=words)
def test_any_file_a_command_reads_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, text: str
) -> None:
    from argparse import Namespace as Arguments

    file = tmp_path_factory.mktemp("file") / "f"
    file.write_bytes(raw)
    for read in (
        lambda: _tokens(str(file)),
        lambda: _tokens(text),
        lambda: _read_passwords(str(file)),
        lambda: _read_passwords(text or "x"),
        lambda: _namespace(Arguments(namespace_fields=raw.decode(errors="surrogateescape"))),
    ):
        try:
            read()
        except KVStoreError:
            continue
