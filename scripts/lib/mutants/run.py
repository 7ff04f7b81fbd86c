"""Plants bugs one at a time and looks whether a test notices: scripts/mutants --help."""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
ACCEPTED = Path("tests/mutants_accepted.toml")
JOBS, SIM_SEEDS = 2, 50
PYTEST_TIMEOUT_S = 60
READ_PATH = (
    *("session", "reader", "locator", "block_lookup", "pins", "pinned", "nodes/directory"),
    *("nodes/fetch", "nodes/remote", "payloads/out", "values/getting"),
)
READ_TESTS = tuple(
    f"tests/client/{name}.py"
    for name in (
        *(
            "pins/test_interrupted_pins",
            "reader/test_locator",
            "test_client",
            "reader/test_integrity",
            "nodes/test_lying_records",
        ),
        *("values/test_existing", "test_health"),
    )
)
REMOTE_TESTS = tuple(
    f"tests/client/nodes/{name}.py"
    for name in ("test_remote_nodes", "silence/test_slow_index", "silence/test_silent_nodes")
)
LONE = ("record", "circuit_breaker", "token_bucket", "client/nodes/saving/placement", "nodedir")
"""Modules outside of those folders whose own tests, `test_NAME*.py`, are all that is near."""
LEFT_OUT = frozenset({"__init__.py", "events.py", "base.py"})
"""Files that decide nothing."""
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


class Mutant(NamedTuple):
    path: Path
    """Relative to the root."""
    line: int
    function: str
    """The function or method that it is in."""
    words: str
    """What stood there, and what stands there now."""
    statement: int
    """The first line of the statement that it is in, or of the function."""
    text: str
    """The whole file with the bug."""

    @property
    def name(self) -> str:
        """Return what it is called in tests/mutants_accepted.toml: lines move, these words stay."""
        return f"{self.function}: {self.words}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of `node`: each a bug that somebody could have written."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            other = copy.deepcopy(node)
            other.ops = [SWAPPED[type(op)]()]  # type: ignore[list-item]
            yield other
        case ast.Compare(ops=[first, second]):
            for i, op in enumerate((first, second)):
                if type(op) in SWAPPED:
                    other = copy.deepcopy(node)
                    other.ops[i] = SWAPPED[type(op)]()  # type: ignore[call-overload]
                    yield other
        case ast.BinOp(op=operator) if type(operator) in SWAPPED:
            changed = copy.deepcopy(node)
            changed.op = SWAPPED[type(operator)]()  # type: ignore[assignment]
            yield changed
        case ast.BoolOp(values=values):
            for i in range(len(values)):
                rest = copy.deepcopy(values[:i] + values[i + 1 :])
                yield rest[0] if len(rest) == 1 else ast.BoolOp(copy.deepcopy(node.op), rest)
        case ast.UnaryOp(op=ast.Not()):
            yield copy.deepcopy(node.operand)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.If(test=test, body=body) if not isinstance(body[0], ast.Raise):
            for outcome in (True, False):
                forced = copy.deepcopy(node)
                forced.test = ast.Constant(outcome)
                if ast.dump(forced.test) != ast.dump(test):
                    yield forced


def places(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield (parent, field, position in it) of every node that may be changed.

    Only code in functions may: what stands outside are limits and layouts, which are chosen. Texts,
    annotations, asserts, lines to the log and calls of a base's method are passed over.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(
            tree, ast.Call
        ):
            continue
        for at, node in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.JoinedStr):
                continue
            if isinstance(node, ast.Expr) and ast.unparse(node).startswith(("log.", "super()")):
                continue
            within = inside or isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
            if within:
                yield tree, field, at
            yield from places(node, inside=within)


def mutants_of(path: Path, root: Path = ROOT, *, texts: bool = True) -> list[Mutant]:
    """Return every bug that can be planted in that file; without `texts` their names alone, which
    takes a tenth of the time."""
    tree = ast.parse((root / path).read_text())
    functions, statements = _spans(tree)
    found = []
    for parent, field, at in places(tree):
        held = getattr(parent, field)
        node = held if at is None else held[at]
        for other in variants(node):
            _put(parent, field, at, other)
            words = f"{_short(node)}  ->  {_short(other)}"
            text = ast.unparse(ast.fix_missing_locations(tree)) if texts else ""
            function, whole = _innermost(functions, node.lineno)
            _, lines = _innermost(statements, node.lineno)
            first = (lines or whole)[0]
            found.append(Mutant(path, node.lineno, function, words, first, text))
            _put(parent, field, at, node)
    return found


Span = tuple[str, tuple[int, ...]]


def _spans(tree: ast.Module) -> tuple[list[Span], list[Span]]:
    """Return the lines of functions by name, and of statements, of compound ones the heads
    alone."""
    functions: list[Span] = []
    statements: list[Span] = []

    def walk(parent: ast.AST, inside: str) -> None:
        for node in ast.iter_child_nodes(parent):
            name = inside
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{node.name}".lstrip(".")
                if not isinstance(node, ast.ClassDef):
                    functions.append((name, (node.lineno, node.end_lineno or node.lineno)))
            elif isinstance(node, ast.stmt):
                body = getattr(node, "body", None) or getattr(node, "cases", None)
                last = node.end_lineno or node.lineno
                if body:
                    first = body[0].pattern if isinstance(node, ast.Match) else body[0]
                    last = max(node.lineno, first.lineno - 1)
                statements.append((name, (node.lineno, last)))
            walk(node, name)

    walk(tree, "")
    return functions, statements


def _innermost(spans: Sequence[Span], line: int) -> Span:
    around = [span for span in spans if span[1][0] <= line <= span[1][1]]
    return min(around, key=lambda span: span[1][1] - span[1][0], default=("", ()))


def _put(parent: ast.AST, field: str, at: int | None, node: ast.AST) -> None:
    if at is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[at] = node


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}:"
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())[:100]


def sources() -> list[Path]:
    """Return the files that are in the scope: core with its protocols, segment, and the client's
    way to a block."""
    found = [
        path
        for name in ("core", "protocol", "segment")
        for path in (ROOT / "kvstore" / name).rglob("*.py")
    ]
    found += [ROOT / f"kvstore/client/{name}.py" for name in READ_PATH]
    found += [ROOT / f"kvstore/{name}.py" for name in LONE]
    return sorted(p.relative_to(ROOT) for p in found if p.name not in LEFT_OUT)


def nearest_tests(root: Path, path: Path) -> list[str]:
    """Return the files of tests that may notice a bug in `path`."""
    if str(path.with_suffix("").relative_to("kvstore")) in LONE:
        folder = root / Path("tests", *(path.parts[1:-1] or ("words",)))
        found = sorted(str(p.relative_to(root)) for p in folder.glob(f"test_{path.stem}*.py"))
    elif "client" in path.parts:
        folder = root / Path("tests", *path.parts[1:-1])
        own = {*folder.rglob(f"test_{path.stem}*.py"), *folder.rglob(f"test_*_{path.stem}.py")}
        found = sorted(str(file.relative_to(root)) for file in own)
        found += [*(REMOTE_TESTS if "nodes" in path.parts else ()), *READ_TESTS]
    else:
        core = path.parts[1] == "core"
        folders = ["core", "protocol", "segment"] if core else [path.parts[1]]
        found = [
            str(p.relative_to(root))
            for folder in folders
            for p in sorted((root / "tests" / folder).rglob("test_*.py"))
        ]
        found.append("tests/fuzz/test_control_messages.py")
    return [name for name in dict.fromkeys(found) if (root / name).exists()]


def accepted(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return for each file the names of survivors that stand, with the reason."""
    path = root / ACCEPTED
    return tomllib.loads(path.read_text()) if path.exists() else {}


def run(root: Path, drawn: Sequence[Mutant], jobs: int, sim_seeds: int) -> list[Mutant]:
    """Return those of `drawn` that nothing noticed; each is printed. Raises `SystemExit` when tests
    fail without a bug.

    Raises `SystemExit` when tests fail without a bug.
    """
    sets: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in drawn:
        sets.setdefault(tuple(nearest_tests(root, mutant.path)), []).append(mutant)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="kvstore-mutants-") as directory:
        copies = [_copied(root, Path(directory, str(i))) for i in range(jobs)]
        for tests, mutants in sets.items():
            shares = [mutants[i::jobs] for i in range(jobs)]
            with ThreadPoolExecutor(jobs) as pool:
                left = pool.map(_survivors, copies, [tests] * jobs, shares, [sim_seeds] * jobs)
                survivors += [mutant for share in left for mutant in share]
    survivors.sort()
    for mutant in survivors:
        print(f"{mutant.path}:{mutant.line}: {mutant.name}", flush=True)
    return survivors


def _copied(root: Path, where: Path) -> Path:
    """Yield a copy of the tree in which bugs are planted, one at a time."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in listed.splitlines():
        if (root / name).is_file():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, where / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "kvstore"], cwd=where, check=True)
    return where


def _survivors(
    where: Path, tests: Sequence[str], mutants: Sequence[Mutant], sim_seeds: int
) -> list[Mutant]:
    """Return what `tests` in the copy at `where` do not notice (plugin.py does the work)."""
    if not mutants:
        return []
    plan, seen = where.with_suffix(".plan"), where.with_suffix(".seen")
    plan.write_text(json.dumps([{**m._asdict(), "path": str(m.path)} for m in mutants]))
    seen.unlink(missing_ok=True)
    lib = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(where), lib)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVSTORE_MUTANTS": str(plan),
        "KVSTORE_MUTANTS_SEEN": str(seen),
        "KVSTORE_MUTANTS_SIM_SEEDS": str(sim_seeds),
    }
    # Long ones run under tools that want more memory than a mutant may have, or for too long.
    options = [
        "-qxs",
        "-m",
        "not long and not nightly",
        "-p",
        "no:cacheprovider",
        "-p",
        "mutants.plugin",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--timeout={PYTEST_TIMEOUT_S}", *tests],
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    outcomes = seen.read_text().split() if seen.exists() else []
    if len(outcomes) != len(mutants):
        print(done.stdout[-4000:], file=sys.stderr)
        raise SystemExit(f"mutants: tests of {mutants[0].path} fail without any bug")
    return [m for m, outcome in zip(mutants, outcomes, strict=True) if outcome == "passed"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="only these (all of the scope)")
    parser.add_argument("--count", type=int, help="how many, drawn at random (all)")
    parser.add_argument("--seed", type=int, default=None, help="of the draw (a new one)")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--sim-seeds", type=int, default=SIM_SEEDS)
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    drawn = everything = [m for path in options.files or sources() for m in mutants_of(path)]
    if options.count is not None:
        drawn = random.Random(seed).sample(everything, min(options.count, len(everything)))
        print(f"seed {seed}: {len(drawn)} of {len(everything)} mutants", flush=True)
    begun = time.monotonic()
    known = accepted()
    drawn = [m for m in drawn if m.name not in known.get(str(m.path), {})]
    left = Counter(mutant.path for mutant in run(ROOT, drawn, options.jobs, options.sim_seeds))
    for path, count in sorted(Counter(mutant.path for mutant in drawn).items()):
        print(f"{path}: {left[path]} of {count}")
    share = left.total() / max(1, len(drawn))
    print(
        f"{left.total()} of {len(drawn)} survived ({share:.1%}), {time.monotonic() - begun:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
