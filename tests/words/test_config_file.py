"""kvstore/config_file.py: what an operator's file sets, what wins over it, what it may not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.settings import STORE_SETTINGS, ConnectorSettings
from connector.transfer.config import KVTransferConfig
from kvstore import Limits, StreamSecurity, UsageError, tenant_salt
from kvstore.config_file import read_config
from kvstore.secret import SIGNING_KEY, secret
from kvstore.settings.removed import CONSTANT, REMOVED
from kvstore.settings.toml_file import CONFIG, CONFIG_BYTES_MAX
from kvstore.spi import BlockSession


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the file that KVSTORE_CONFIG names."""
    path = tmp_path / "kv.toml"
    monkeypatch.setenv(CONFIG, str(path))

    def write(text: str) -> Path:
        path.write_text(text)
        return path

    return write


def test_without_a_file_everything_is_as_without_this_feature(monkeypatch) -> None:
    monkeypatch.delenv(CONFIG, raising=False)
    assert read_config().limits() == Limits()
    assert ConnectorSettings.from_extra({}) == ConnectorSettings()


def test_every_limit_can_be_set_in_the_file_and_reaches_a_client(written, tmp_path) -> None:
    moved = {name: getattr(Limits(), name) / 2 for name in Limits.__slots__}
    moved = {n: v if n.endswith("_s") else int(v) for n, v in moved.items()}
    written("[limits]\n" + "".join(f"{name} = {value}\n" for name, value in moved.items()))
    assert read_config().limits() == Limits(**moved)
    session = BlockSession("redis://127.0.0.1:1", run_dir=tmp_path / "run")
    assert session.limits == Limits(**moved)
    session.close()
    given = Limits(clients=7)
    session = BlockSession("redis://127.0.0.1:1", run_dir=tmp_path / "run", limits=given)
    assert session.limits == given
    session.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[limit]\n", r"kv.toml='limit': unknown: did you mean limits\?"),
        ("limits = 3\n", r"kv.toml='limits': must be a table: \[limits\]"),
        ("[limits]\nclient = 3\n", r"kv.toml \[limits\]='client': unknown: did you mean clients\?"),
        ("[limits]\nclients = '3'\n", r"limits.clients='3': must be a whole number of at least 1"),
        ("[security]\nsecret = 'hunter2'\n", r"\[security\]='secret': unknown: did you mean secre"),
        ("[limits\n", "must be TOML"),
        ("# " + "x" * CONFIG_BYTES_MAX, f"at most {CONFIG_BYTES_MAX} bytes"),
    ],
)
def test_what_is_wrong_in_it_is_said_and_no_secret_is_shown(written, text, says) -> None:
    written(text)
    with pytest.raises(UsageError, match=says) as caught:
        _ = read_config().limits(), read_config().security()
    assert "hunter2" not in str(caught.value)


def test_what_was_a_setting_is_refused_with_what_became_of_it(written) -> None:
    """Whoever reads the file for anything says so, whatever program gave it its limits."""
    became = dict.fromkeys(("save_jobs_max", "ROUTER_STOP_S"), CONSTANT)
    became = {("connector_limits", name): said for name, said in {**became, **REMOVED}.items()}
    became |= {("limits", name): said for name, said in REMOVED.items()}
    for (table, name), said in became.items():
        path = written(f"[{table}]\n{name} = 3\n")
        with pytest.raises(UsageError) as caught:
            StreamSecurity.from_environment()
        assert str(caught.value) == f"{path} [{table}]={name!r}: {said}"
    assert len(became) > 60


def test_a_limit_that_was_a_setting_is_refused_wherever_an_engine_has_it(written) -> None:
    written("")
    with pytest.raises(UsageError, match=r"extra_config.limits='gone_keys': is a constant now"):
        ConnectorSettings.from_extra({"limits": {"gone_keys": 5}})
    written("[connector]\nlimits = {names = 5}\n")
    with pytest.raises(UsageError, match=r"\[connector\].limits='names': is a constant now"):
        ConnectorSettings.from_extra({})


def test_nothing_is_removed_and_there() -> None:
    there = REMOVED.keys() & {*Limits.__slots__, *ConnectorSettings.__slots__}
    assert there == {name for name, said in REMOVED.items() if "[connector]" in said}


def test_a_file_that_is_not_there_is_an_error_not_the_defaults(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(CONFIG, str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=rf"^{CONFIG}=.*none.toml.*No such file"):
        read_config()
    with pytest.raises(UsageError, match=r"^config=.*No such file"):
        read_config(tmp_path / "neither.toml")


def test_secrets_and_certificates_are_found_by_it_and_variables_win(
    written, tmp_path, monkeypatch
) -> None:
    for name in ("secret", "signing_key", "salt", "other"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    written(
        "[security]\n"
        + "".join(f"{n}_file = '{tmp_path / n}'\n" for n in ("secret", "signing_key", "salt"))
        + "tls_ca = '/etc/ca.pem'\ntls_cert = '/etc/c.pem'\ntls_key = '/etc/k.pem'\n"
    )
    security = StreamSecurity.from_environment()
    assert security.secret == b"secret" * 16
    assert security.tls_ca == Path("/etc/ca.pem")
    assert security.tls_key == Path("/etc/k.pem")
    assert secret(SIGNING_KEY) == b"signing_key" * 16
    assert tenant_salt() == b"salt" * 16
    monkeypatch.setenv("KVSTORE_SALT", "s" * 20)
    monkeypatch.setenv("KVSTORE_SECRET_FILE", str(tmp_path / "other"))
    monkeypatch.setenv("KVSTORE_TLS_CA", "/other/ca.pem")
    assert tenant_salt() == b"s" * 20
    assert StreamSecurity.from_environment().secret == b"other" * 16
    assert StreamSecurity.from_environment().tls_ca == Path("/other/ca.pem")


def test_an_engine_takes_the_file_where_its_own_configuration_says_nothing(written) -> None:
    written(
        "[limits]\nredis_timeout_s = 0.2\nclients = 5\nstream_timeout_s = 3\n"
        "[connector]\nurl = 'redis://file:1'\nlayerwise = true\n"
        "limits = {clients = 6, request_timeout_s = 4}\n"
    )
    made = ConnectorSettings.from_extra({"url": "redis://own:1", "limits": {"clients": 7}})
    assert (made.url, made.layerwise) == ("redis://own:1", True)
    assert made.lookup_timeout_s == 0.2
    assert made.limits == Limits(
        redis_timeout_s=0.2, stream_timeout_s=3, request_timeout_s=4, clients=7
    )
    assert ConnectorSettings.from_extra({"lookup_timeout_s": 0.3}).lookup_timeout_s == 0.3
    # one file for all engines: what has no effect on this one is no error
    pages = ConnectorSettings.from_extra({}, only=STORE_SETTINGS)
    assert (pages.url, pages.layerwise) == ("redis://file:1", False)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"limits": {"client": 1}}, r"extra_config.limits='client': .*did you mean clients"),
        ({"limits": {"clients": 0}}, r"^limits.clients=0: must be a whole number of at least 1"),
        ({"limits": 5}, r"extra_config.limits=5: must be a table"),
    ],
)
def test_limits_of_an_engines_own_configuration_are_checked_alike(written, extra, says) -> None:
    written("[limits]\nclients = 5\n")
    with pytest.raises(UsageError, match=says):
        ConnectorSettings.from_extra(extra)


def test_a_wrong_name_for_engines_is_said_by_the_engine_that_reads_it(written) -> None:
    written("[connector]\nlayer_wise = true\n")
    with pytest.raises(UsageError, match=r"\[connector\]='layer_wise': .*did you mean layerwise"):
        ConnectorSettings.from_extra({})


def test_the_transfer_config_is_read_below_its_variables(written) -> None:
    written("[transfer]\nkv_connector = 'KVStoreConnector'\nkv_role = 'kv_both'\nkv_port = 5\n")
    made = KVTransferConfig.from_env({"KVSTORE_KV_PORT": "6"})
    assert (made.kv_connector, made.kv_role, made.kv_port) == ("KVStoreConnector", "kv_both", 6)
