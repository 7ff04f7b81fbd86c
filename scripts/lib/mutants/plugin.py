"""Collects tests once and lets a fork of them meet each planted bug: a plugin for pytest.

`scripts/lib/mutants/run.py` runs it in a copy of the tree, with a JSON file of mutants in
`KVSTORE_MUTANTS`, and reads one JSON line for each from the path in `KVSTORE_MUTANTS_SEEN`.
"""

from __future__ import annotations

import ast
import builtins
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

MUTANT_TIMEOUT_S = 300.0
"""For all tests of one mutant: one that makes them hang was noticed."""
CPU_S = 5
"""Processor time for a mutant's tests, besides thrice what they take without a bug."""
MEMORY_BYTES_MAX = 48 << 30
"""Of one process: a bug may ask for more than there is."""
PROBE = "kvstore_mutants_reached"
POLL_S = 0.005


class Whole:
    """Runs all tests once, and tells the parent which statements each of them reached."""

    def __init__(self, files: frozenset[str], writer: int) -> None:
        self._writer = writer
        self._reached: set[tuple[str, int]] = set()
        self._starts = False
        self._tests: dict[str, dict[str, Any]] = {}
        setattr(builtins, PROBE, lambda file, line: self._reached.add((file, line)))
        for file in files:
            text = Path(file).read_text()
            plant(file, text, probed(text, file), functions_of(file))
        sys.addaudithook(self._audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._reached.clear()
        self._starts = False
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] = {
                "reached": sorted(self._reached.copy()),
                "starts": self._starts,
                "seconds": time.monotonic() - begun,
            }

    def pytest_sessionfinish(self) -> None:
        with os.fdopen(self._writer, "w") as told:
            json.dump(self._tests, told)

    def _audit(self, event: str, _: object) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._starts = True


class Forks:
    """Runs the tests once whole, then those that touch a mutant, for each mutant."""

    def __init__(self, plan: list[dict[str, Any]], seen: Path, sim_seeds: int) -> None:
        self._plan = plan
        self._seen = seen
        self._sim_seeds = sim_seeds
        self._in_mutant = False

    def pytest_collection(self) -> None:
        """Have hypothesis stop at the first failure: it need not look for a smaller one."""
        if "hypothesis" not in sys.modules:
            return
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", derandomize=True, deadline=None, database=None, phases=phases
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Fork for each mutant. In a fork: None, and pytest goes on with the tests that were
        chosen."""
        if session.testsfailed:
            return None
        items = list(session.items)
        gc.unfreeze()  # what tests/conftest.py froze: functions are found among the objects
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            session.config.pluginmanager.register(Whole(self._files(), writer))
            return None
        os.close(writer)
        with os.fdopen(reader) as told:
            words = told.read()
        _, status = os.waitpid(child, 0)
        if status or not words:
            raise pytest.UsageError("tests fail without any bug")
        touched = json.loads(words)
        functions = {file: functions_of(file) for file in self._files()}
        gc.freeze()  # what a fork's collector would write to is copied
        with self._seen.open("a") as seen:
            for mutant in self._plan:
                session.items[:] = chosen(items, touched, mutant)
                path = Path(mutant["path"])
                original = path.read_text()
                outcome = "passed"
                if session.items:
                    if (child := os.fork()) == 0:
                        os.setpgid(0, 0)
                        usual_s = sum(touched[item.nodeid]["seconds"] for item in session.items)
                        most_s = int(CPU_S + 3 * usual_s + self._sim_seeds)
                        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
                        self._in_mutant = True
                        session.config.option.tbstyle = "no"
                        file = str(path.resolve())
                        plant(file, original, mutant["text"], functions[file])
                        return None
                    outcome = self._wait(child, path, mutant["text"])
                seen.write(f"{outcome}\n")
                seen.flush()
        session.items[:] = []
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Simulate, in a fork of a mutant that no test noticed. Then the fork ends, at once."""
        if self._in_mutant:
            noticed = session.testsfailed or _broken_seed(self._sim_seeds)
            os._exit(int(noticed or session.exitstatus != pytest.ExitCode.OK))

    def _files(self) -> frozenset[str]:
        return frozenset(str(Path(mutant["path"]).resolve()) for mutant in self._plan)

    def _wait(self, child: int, path: Path, text: str) -> str:
        before, times = path.read_bytes(), path.stat()
        # For processes that the tests start.
        path.write_text(text)
        try:
            until = time.monotonic() + MUTANT_TIMEOUT_S
            while time.monotonic() < until:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    return "noticed" if status else "passed"
                time.sleep(POLL_S)
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "noticed"
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def probed(text: str, file: str) -> str:
    """Return `text` with a call before each statement of its functions that tells the line."""
    tree = ast.parse(text)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if not isinstance(statements, list) or isinstance(node, ast.ClassDef):
                    continue
                if statements and not _is_probe(statements[0]):
                    pairs = [[_probe(file, s.lineno), s] for s in statements]
                    setattr(node, field, [part for pair in pairs for part in pair])
        function.body.insert(0, _probe(file, function.lineno))
    return ast.unparse(ast.fix_missing_locations(tree))


def chosen(
    items: list[pytest.Item], touched: dict[str, dict[str, Any]], mutant: dict[str, Any]
) -> list[pytest.Item]:
    """Return the tests that reach the mutant's statement, quick ones and the module's own first.
    Tests of the module's own file that start processes are among them: what those run is not
    seen."""
    file = str(Path(mutant["path"]).resolve())
    own = f"/test_{Path(file).stem}"
    found: list[tuple[tuple[bool, float], pytest.Item]] = []
    for item in items:
        test = touched.get(item.nodeid)
        if test is None:
            continue
        is_own = own in item.nodeid
        runs = [file, mutant["statement"]] in test["reached"]
        if runs or (is_own and test["starts"]):
            found.append(((not is_own and test["seconds"] > 0.1, test["seconds"]), item))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def functions_of(file: str) -> list[FunctionType]:
    """Return the functions of the module of that file, if it is imported."""
    found = (thing for thing in gc.get_objects() if isinstance(thing, FunctionType))
    return [function for function in found if function.__code__.co_filename == file]


def plant(file: str, original: str, text: str, functions: list[FunctionType]) -> None:
    """Give the functions of the module of that file the code of `text`."""
    codes = dict(
        zip(
            _functions(compile(original, file, "exec", dont_inherit=True)),
            _functions(compile(text, file, "exec", dont_inherit=True)),
            strict=True,
        )
    )
    for function in functions:
        other = codes.get(function.__code__)
        # A closure over something else is a change of names, which no mutant makes.
        if other is not None and other.co_freevars == function.__code__.co_freevars:
            function.__code__ = other


def _broken_seed(seeds: int) -> bool:
    """Tell whether one of so many simulated seeds breaks a rule."""
    if not seeds:
        return False
    from kvstore.testing.sim.many import try_seed

    return any(try_seed(seed).broken for seed in range(seeds))


def _probe(file: str, line: int) -> ast.stmt:
    (call,) = ast.parse(f"{PROBE}({file!r}, {line})").body
    return call


def _is_probe(statement: ast.stmt) -> bool:
    return ast.unparse(statement).startswith(PROBE)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Return functions of a module and methods of its classes, in order; not what they contain."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class's body
                yield const
            else:
                yield from _functions(const)


if "KVSTORE_MUTANTS" in os.environ:

    def pytest_configure(config: pytest.Config) -> None:
        plan = json.loads(Path(os.environ["KVSTORE_MUTANTS"]).read_text())
        config.pluginmanager.register(
            Forks(
                plan,
                Path(os.environ["KVSTORE_MUTANTS_SEEN"]),
                int(os.environ["KVSTORE_MUTANTS_SIM_SEEDS"]),
            )
        )
