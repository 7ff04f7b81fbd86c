"""docs/settings.md says what the code does."""

import os
import re

import settings_reference as reference
from own_python import printed

from kvstore.settings.toml_file import CONFIG, TABLES


def test_every_setting_is_in_the_document_as_it_is_in_the_code():
    _, mark, below = reference.DOCUMENT.read_text().partition(reference.MARK)
    assert mark + below == reference.text(), "run python tests/settings_reference.py"
    assert tuple(reference.KINDS) == TABLES


def test_the_example_of_the_document_is_read_by_all_that_read_it(tmp_path):
    example = re.search(r"```toml\n(.*?)```", reference.DOCUMENT.read_text(), re.DOTALL)
    path = tmp_path / "kv.toml"
    path.write_text(example[1])
    code = (
        "from kvstore.config_file import read_config\n"
        "from connector.settings import ConnectorSettings\n"
        "file = read_config(); file.security()\n"
        "made = ConnectorSettings.from_extra({})\n"
        "print(file.tables['connector']['tp_sizes'], file.limits().pins_per_client,"
        " made.limits.request_timeout_s, made.limits.stream_connections_max)"
    )
    ran = printed(code, env={**os.environ, CONFIG: str(path)})
    assert ran == "[1, 2] 8192 5.0 512\n"
