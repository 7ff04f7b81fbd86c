"""Lints and renders the Helm chart by Helm's own engine: for `scripts/chart`.

The rendering begins with a digest of the chart's files, so that a change without a new rendering is
found where there is no Helm (tests/repository/test_chart.py).
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

HELM = Path(__file__).parents[2] / "deploy" / "helm"
CHART, RENDERED = HELM / "kvstore", HELM / "rendered.yaml"
ERROR = 3
"""Helm's severity of what makes `helm lint` fail."""


def digest() -> str:
    """Return one of all names and contents in the chart."""
    files = sorted(path for path in CHART.rglob("*") if path.is_file())
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(CHART)}\n{path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def rendered() -> str:
    import helm_python.chart as helm

    values = helm.values_from_yaml((CHART / "ci" / "all-values.yaml").read_text())
    report = helm.lint(CHART, values)
    wrong = [one for one in report["messages"] if one["severity"] >= ERROR] + report["errors"]
    if wrong:
        raise SystemExit(f"chart: {wrong}")
    with helm.Chart.load(CHART) as chart:
        parts = chart.render(values, name="kvstore", namespace="kvstore")
    text = f"# Made by scripts/chart from the chart with digest {digest()}\n"
    for name, manifest in sorted(parts.items()):
        body = "\n".join(line.rstrip() for line in manifest.strip().splitlines())
        if body and name.endswith(".yaml"):
            text += f"---\n# Source: {name}\n{body}\n"
    return text


def main(*arguments: str) -> int:
    text = rendered()
    if arguments == ("--check",):
        if RENDERED.read_text() != text:
            print("chart: deploy/helm/rendered.yaml is not current: scripts/chart", file=sys.stderr)
            return 1
        return 0
    RENDERED.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
