"""Prepares the pages of the site, and finishes what the generator made: for `scripts/site`.

The pages are README, `docs/` and two lists of public names. Links that lead out of them become
plain text, since the site stands alone. Beside the HTML come llms.txt and each page as Markdown.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAV = (
    ("Start", ("README.md", "docs/coming-from.md", "docs/compatibility.md")),
    ("Run it", ("docs/run.md", "docs/settings.md", "docs/compose.md", "docs/kubernetes.md")),
    ("", ("docs/systemd.md", "docs/disk.md", "docs/rdma.md", "docs/explain.md", "docs/runbook.md")),
    ("", ("docs/capacity.md", "docs/security.md")),
    ("Engines", ("docs/engines.md", "docs/connector.md", "docs/prefill-decode.md")),
    ("", ("docs/llm-d.md", "docs/dynamo.md")),
    ("How it works", ("docs/architecture.md", "docs/where.md", "docs/decisions/README.md")),
    ("Reference", ("api/kvstore.md", "api/spi.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    ("Evidence", ("docs/claims.md", "docs/benchmarks.md", "docs/conformance.md", "docs/chaos.md")),
)
"""Sections and their pages in order; one without a name goes on with the section before it."""
HIDDEN = ("docs/README.md",)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
CONFIGURATION = """\
[project]
site_name = "kvstore"
site_description = "Keep and share the KV cache of LLM engines"
docs_dir = "docs"
site_dir = "site"
nav = {nav}
[project.theme]
font = false
features = ["navigation.sections", "navigation.top", "content.code.copy", "search.highlight"]
[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
[project.markdown_extensions.attr_list]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.superfences]
[project.plugins.mkdocstrings.handlers.python]
paths = ["{root}"]
[project.plugins.mkdocstrings.handlers.python.options]
show_source = false
show_root_heading = true
show_root_full_path = false
heading_level = 2
members_order = "source"
show_signature_annotations = true
signature_crossrefs = false
filters = ["!^_"]
"""


def sources() -> list[str]:
    """Return the pages of the repository, as paths from its root."""
    docs = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(p for p in docs if p not in HIDDEN)]


def place(source: str) -> str:
    """Return where a page of the repository lies in the site."""
    if source == "README.md":
        return "index.md"
    inside = source.removeprefix("docs/")
    return str(Path(inside).with_name("index.md")) if inside.endswith("README.md") else inside


def linked(text: str, source: str) -> str:
    """Return the page with its links as they lead within the site."""
    pages = {one: place(one) for one in sources()}
    home, here = Path(source).parent, Path(place(source)).parent

    def changed(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if ":" in target or not path:
            return match[0]
        found = os.path.normpath(home / path)
        if (ROOT / found).is_dir():
            found = f"{found}/README.md"
        where = pages.get(found) or (place(found) if image else None)
        if where is None:
            return label
        return f"{image}[{label}]({os.path.relpath(where, here)}{mark}{anchor})"

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(changed, part) for part in parts[::2]]
    text = "".join(parts)
    # A label that is code is split above: links around code are found once more, whole.
    return re.sub(r"\[(`[^`\n]+`)\]\(([^)\s]+)\)", lambda m: changed(_match(m)), text)


def _match(match: re.Match[str]) -> re.Match[str]:
    found = LINK.fullmatch(match[0])
    assert found is not None
    return found


def public(module: str) -> list[str]:
    """Return the names that a module exports, in its order."""
    tree = ast.parse((ROOT / module).read_text())
    found: list[str] = []
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            found += ast.literal_eval(node.value)  # type: ignore[attr-defined]
    return found


def api(module: str, file: str) -> str:
    doc = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    names = "\n\n".join(f"::: {module}.{name}" for name in public(file))
    return f"# {module}\n\n{doc}\n\n{names}\n"


def title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").strip()


def stage(directory: Path) -> None:
    docs = directory / "docs"
    for source in sources():
        page = docs / place(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(linked((ROOT / source).read_text(), source))
    for picture in [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "docs").rglob("*.png")]:
        copy = docs / picture.relative_to(ROOT / "docs")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, copy)
    (docs / "api").mkdir()
    (docs / "api" / "kvstore.md").write_text(api("kvstore", "kvstore/__init__.py"))
    (docs / "api" / "spi.md").write_text(api("kvstore.spi", "kvstore/spi.py"))
    nav: dict[str, list[str]] = {}
    for section, pages in NAV:
        nav.setdefault(section or list(nav)[-1], []).extend(map(place, pages))
    listed = {page for pages in nav.values() for page in pages}
    lost = {place(one) for one in sources() if "/decisions/" not in one} - listed
    if lost:
        raise SystemExit(f"site: no section of NAV has {', '.join(sorted(lost))}")
    shown = ", ".join(
        f'{{"{section}" = [{", ".join(repr(page) for page in pages)}]}}'
        for section, pages in nav.items()
    )
    text = CONFIGURATION.replace("{nav}", f"[{shown}]").replace("{root}", str(ROOT))
    (directory / "zensical.toml").write_text(text)


def llms(docs: Path) -> str:
    """Return the index of the pages for language models."""
    lines = ["# kvstore", ""]
    lines += ["> Keep and share the KV cache of LLM engines: blocks in shared memory,"]
    lines += ["> a look-up buffer in Redis, connectors for vLLM, SGLang, LMCache, TensorRT-LLM."]
    for section, pages in NAV:
        lines += ["", f"## {section}", ""] if section else []
        for page in map(place, pages):
            lines.append(f"- [{title((docs / page).read_text())}]({page})")
    return "\n".join(lines) + "\n"


def finish(staged: Path, directory: Path) -> None:
    docs = staged / "docs"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(staged / "site", directory)
    for page in docs.rglob("*.md"):
        copy = directory / page.relative_to(docs)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copy)
    (directory / "llms.txt").write_text(llms(docs))


if __name__ == "__main__":
    what, staged, *more = sys.argv[1:]
    if what == "stage":
        stage(Path(staged))
    else:
        finish(Path(staged), Path(more[0]))
