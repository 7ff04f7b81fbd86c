"""Plant bugs one at a time and see whether a test notices: scripts/mutants --help."""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COUNT, JOBS, SIM_SEEDS = 60, 2, 100
TESTS_TIMEOUT_S = 300.0
"""For the tests of one mutant: one that makes them hang was noticed."""
PYTEST_TIMEOUT_S = 60
READ_PATH = ("reader", "locator", "here")
READ_TESTS = tuple(
    f"tests/client/test_{name}.py"
    for name in ("locator", "client", "integrity", "lying_records", "existing", "health")
)
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
    words: str
    """What stood there, and what stands there now."""
    text: str
    """The whole file with the bug."""


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of `node`: each a bug that somebody could have written."""
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
    """(parent, field, position in it) of every node that may be changed.

    Code in functions alone: what stands outside are limits and layouts, which are chosen. Texts,
    annotations, asserts and lines to the log are passed over.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(
            tree, ast.Call
        ):
            continue
        for at, node in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.JoinedStr):
                continue
            if isinstance(node, ast.Expr) and ast.unparse(node).startswith("log."):
                continue
            within = inside or isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
            if within:
                yield tree, field, at
            yield from places(node, inside=within)


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Every bug that can be planted in that file."""
    tree = ast.parse((root / path).read_text())
    found = []
    for parent, field, at in places(tree):
        held = getattr(parent, field)
        node = held if at is None else held[at]
        for other in variants(node):
            _put(parent, field, at, other)
            words = f"{_short(node)}  ->  {_short(other)}"
            found.append(
                Mutant(path, node.lineno, words, ast.unparse(ast.fix_missing_locations(tree)))
            )
            _put(parent, field, at, node)
    return found


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
    """Core with its protocols, segment, and the client's way to a block."""
    found = [
        path for name in ("core", "segment") for path in (ROOT / "kvstore" / name).glob("*.py")
    ]
    found += [ROOT / f"kvstore/client/{name}.py" for name in READ_PATH]
    return sorted(p.relative_to(ROOT) for p in found if p.name not in LEFT_OUT)


def nearest_tests(root: Path, path: Path) -> list[str]:
    """The nearest first: pytest stops at the first failure."""
    if path.parent.name == "client":
        found = [*READ_TESTS]
    else:
        folder = Path("tests", *path.parts[1:-1])
        found = sorted(str(p.relative_to(root)) for p in (root / folder).glob("test_*.py"))
        found.append("tests/fuzz/test_control_messages.py")
    mirrored = f"test_{path.stem}.py"
    found = [name for name in found if (root / name).exists()]
    return sorted(found, key=lambda name: not name.endswith(mirrored))


class Workshop:
    """A copy of the tree in which bugs are planted, one at a time."""

    def __init__(self, root: Path, where: Path, sim_seeds: int) -> None:
        self._where = where
        self._sim_seeds = sim_seeds
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

    def noticed(self, path: Path, text: str) -> bool:
        """Whether the tests of `path` fail when it says `text`."""
        target = self._where / path
        before = target.read_bytes()
        target.write_text(text)
        try:
            return not self._passes(path)
        finally:
            target.write_bytes(before)

    def _passes(self, path: Path) -> bool:
        pytest = ["pytest", "-qx", "-p", "no:cacheprovider", f"--timeout={PYTEST_TIMEOUT_S}"]
        if not self._run([*pytest, *nearest_tests(self._where, path)]):
            return False
        sim = ["kvstore.testing.sim", "--jobs", "1", "--seeds", str(self._sim_seeds)]
        return not self._sim_seeds or self._run(sim)

    def _run(self, module: Sequence[str]) -> bool:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._where),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", *module],
                cwd=self._where,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TESTS_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def run(root: Path, drawn: Sequence[Mutant], jobs: int, sim_seeds: int) -> list[Mutant]:
    """Those of `drawn` that nothing noticed; each is printed.

    Raises `SystemExit` when tests fail without a bug.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-mutants-") as directory:
        free: SimpleQueue[Workshop] = SimpleQueue()
        for i in range(jobs):
            free.put(Workshop(root, Path(directory, str(i)), sim_seeds))

        def noticed(mutant: Mutant) -> bool:
            shop = free.get()
            try:
                return shop.noticed(mutant.path, mutant.text)
            finally:
                free.put(shop)

        with ThreadPoolExecutor(jobs) as pool:
            # Once for each set of tests.
            sets = {frozenset(nearest_tests(root, m.path)): m.path for m in drawn}
            whole = [Mutant(path, 0, "", (root / path).read_text()) for path in sets.values()]
            for mutant, failed in zip(whole, pool.map(noticed, whole), strict=True):
                if failed:
                    raise SystemExit(f"mutants: tests of {mutant.path} fail without any bug")
            survivors = []
            for mutant, seen in zip(drawn, pool.map(noticed, drawn), strict=True):
                if not seen:
                    survivors.append(mutant)
                    print(f"{mutant.path}:{mutant.line}: {mutant.words}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="only these (all of the scope)")
    parser.add_argument("--count", type=int, default=COUNT, help=f"how many, drawn ({COUNT})")
    parser.add_argument("--seed", type=int, default=None, help="of the draw (a new one)")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--sim-seeds", type=int, default=SIM_SEEDS)
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    everything = [m for path in options.files or sources() for m in mutants_of(path)]
    drawn = random.Random(seed).sample(everything, min(options.count, len(everything)))
    print(f"seed {seed}: {len(drawn)} of {len(everything)} mutants", flush=True)
    begun = time.monotonic()
    left = run(ROOT, drawn, options.jobs, options.sim_seeds)
    share = len(left) / max(1, len(drawn))
    print(f"{len(left)} of {len(drawn)} survived ({share:.1%}), {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
