"""Everything that ships runs as one user: another user is another host (docs/decisions/0103)."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OURS = "10001"
OF_REDIS = {"deploy/kubernetes/redis.yaml"}
"""Nothing of Redis is anybody's memory."""
USER = re.compile(
    r"^\s*(?:USER|user:|runAsUser:|runAsGroup:|fsGroup:)\s+\"?(\w+)(?::(\w+))?"
    r"|\buid=(\w+),gid=(\w+)"
    r"|--uid (\w+) --gid (\w+)",
    re.MULTILINE,
)


def test_all_images_pods_and_volumes_name_the_same_user() -> None:
    files = [REPOSITORY / name for name in ("Dockerfile", "docker-compose.yml")]
    files += sorted((REPOSITORY / "deploy/kubernetes").glob("*.yaml"))
    named = {
        str(path.relative_to(REPOSITORY)): {
            user for found in USER.findall(path.read_text()) for user in found if user
        }
        for path in files
    }
    assert {name for name, users in named.items() if OURS in users} >= {
        "Dockerfile",
        "docker-compose.yml",
        *(f"deploy/kubernetes/{name}.yaml" for name in ("engine", "node", "one-pod")),
    }
    others = {name: users - {OURS} for name, users in named.items() if name not in OF_REDIS}
    assert {name: users for name, users in others.items() if users} == {}


def test_a_service_of_systemd_is_for_engines_of_its_own_user() -> None:
    unit = (REPOSITORY / "deploy/systemd/kvstore-node.service").read_text()
    guide = (REPOSITORY / "docs/systemd.md").read_text()
    (user,) = re.findall(r"^User=(\w+)$", unit, re.MULTILINE)
    assert f"User={user}" in guide.partition("An engine's unit")[2]
