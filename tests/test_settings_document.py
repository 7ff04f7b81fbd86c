"""docs/settings.md says what the code does."""

import re
import tomllib

import settings_reference as reference

from connector.settings import ConnectorSettings
from kvstore.config_file import CONFIG, TABLES, read_config


def test_every_setting_is_in_the_document_as_it_is_in_the_code():
    _, mark, below = reference.DOCUMENT.read_text().partition(reference.MARK)
    assert mark + below == reference.text(), "run python tests/settings_reference.py"
    assert tuple(reference.KINDS) == TABLES


def test_the_example_of_the_document_is_read_by_all_that_read_it(tmp_path, monkeypatch):
    example = re.search(r"```toml\n(.*?)```", reference.DOCUMENT.read_text(), re.DOTALL)
    path = tmp_path / "kv.toml"
    path.write_text(example[1])
    monkeypatch.setenv(CONFIG, str(path))
    file = read_config()
    assert file.tables == tomllib.loads(example[1])
    assert file.limits().pins_per_client == 8192
    file.security()
    assert ConnectorSettings.from_extra({}).limits.request_timeout_s == 5.0
