"""What `import connector` gives, and what it does not cost."""

from __future__ import annotations

import pytest
from own_python import printed

import connector


def test_every_exported_name_can_be_imported_and_nothing_else_is_promised() -> None:
    assert sorted(connector.__all__) == sorted(connector._MODULE_OF)
    for name in connector.__all__:
        assert getattr(connector, name).__module__.startswith("connector.") or name.islower()
    assert set(connector.__all__) <= set(dir(connector))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'connector' has no attribute 'Nothing'"):
        _ = connector.Nothing


def test_all_names_together_import_neither_torch_nor_numpy_nor_an_engine() -> None:
    code = (
        "import sys, connector\n"
        "for name in connector.__all__: getattr(connector, name)\n"
        "print([m for m in ('torch', 'numpy', 'vllm') if m in sys.modules])"
    )
    ran = printed(code)
    assert ran.strip() == "[]"
