"""`scripts/cluster`, as far as it needs no hosts."""

import tempfile

import cluster
import pytest

from kvstore import UsageError


def test_a_directory_that_somebody_else_has_made_is_not_used(tmp_path, monkeypatch):
    """The cluster's secret goes there, and root writes it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = cluster.Places("c").root.parent
    assert place.parent == tmp_path
    cluster.Places("c").host("a")
    cluster.Places("c")
    theirs = tmp_path / "theirs"
    place.rename(theirs)
    place.symlink_to(theirs)
    with pytest.raises(UsageError, match="not a link"):
        cluster.Places("c")
    place.unlink()
    theirs.rename(place).chmod(0o777)
    with pytest.raises(UsageError, match="0700"):
        cluster.Places("c")
