"""Checks and measures on a machine with a GPU what `scripts/gpu-check` says, in its order.

What the driver answers comes first, then the tests of copies, then engines from the safest kind
to the usual one, then figures: what ends early has told what the rest stands on.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import gpu_judge
from gpu.packing import ATTENTION_FILES, VLLM_FILES, VLLM_WHEELS
from gpu.probe import ANSWERS, FIGURES
from gpu.rungs import BY_DEFAULT, CLIFF
from gpu.steps import Became, Step, Steps

ROOT = Path(__file__).parents[3]
MACHINE = "nvidia-smi; uname -r; df -h /dev/shm; echo locked memory, KiB: $(ulimit -l)"
TEST_OF_COPIES = "tests/connector/transfer/test_copy.py"
SANITIZED = "real_geometries and (layers-apart or mla or odd or kernel-blocks)"
OUTPUT, ROWS, JUDGE, LOGS = "output.txt", "rows.jsonl", "judge.txt", "logs.tgz"
BENCH, PULLS, LOCKING, ENGINES = "bench.json", "ipc.json", "locking.json", "engines.json"
RESULTS = (OUTPUT, ROWS, BENCH, PULLS, LOCKING, ENGINES, JUDGE, LOGS)
"""All that a run leaves in its folder."""
UNPACK_S = 120.0


Command = list[str | Path]


class Planned(NamedTuple):
    """Names a step and the part that it belongs to; the steps of a part follow each other."""

    part: str
    step: Step


def plan(
    out: Path, scratch: Path, engine_env: dict[str, str], options: Options
) -> Iterator[Planned]:
    """Yield all steps, in their order. Engines leave their logs in folders of `scratch`."""
    python, lib = sys.executable, Command([sys.executable, "scripts/lib"])
    yield Planned("answers", Step("machine", 30, ["bash", "-c", MACHINE]))
    rows: Command = ["--rows", out / ROWS]
    for name, seconds in ANSWERS.items():
        yield Planned("answers", Step(name, seconds, [*lib, "gpu.probe", name, *rows]))
    pytest: Command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-rs"]
    pytest += ["--timeout", "60"]
    # Each file in a process of its own: after a fault on the device all later calls of one fail.
    for file in (*sorted(ROOT.glob("tests/gpu/test_*.py")), ROOT / TEST_OF_COPIES):
        command: Command = [
            *pytest,
            "-v",
            "--durations",
            "3",
            file.relative_to(ROOT),
            *options.tests,
        ]
        yield Planned("tests", Step(file.stem, 120, command))
    engines: dict[str, float] = {**BY_DEFAULT, **CLIFF}
    for name, limit_s in engines.items():
        command = [*lib, "gpu.rungs", name, *rows, "--folder", scratch / name]
        part = "cliff" if name in CLIFF else "engines"
        yield Planned(part, Step(name, limit_s, command, engine_env))
    for name, seconds in FIGURES.items():
        yield Planned("figures", Step(name, seconds, [*lib, "gpu.probe", name, *rows]))
    ipc: Command = [python, "-m", "benchmarks.gpu_ipc", "--out", out / PULLS]
    yield Planned("figures", Step("ipc", 60, ipc))
    bench: Command = [python, "-m", "benchmarks.suites.gpu", "--out", out / BENCH]
    bench += ["--thread-blocks", "8", "16", "32", "64", *["--quick"] * options.quick]
    yield Planned("figures", Step("bench", 140, bench))
    figures: Command = [*lib, "gpu.engine_figures", "--out", out / ENGINES]
    figures += ["--folder", scratch / "engine-figures"]
    yield Planned("figures", Step("engine-figures", 200, figures, engine_env))
    locking: Command = [python, "-m", "benchmarks.gpu_locking", "--out", out / LOCKING]
    yield Planned("figures", Step("locking", 90, locking))
    for tool in ("memcheck", "initcheck") if shutil.which("compute-sanitizer") else ():
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "1",
            *pytest,
            "-q",
        ]
        command += ["tests/gpu/test_paged_copy.py", "-k", SANITIZED]
        yield Planned("sanitizer", Step(f"sanitizer-{tool}", 150, command))


class Options(NamedTuple):
    """Says which steps are run, and how."""

    only: Sequence[str] = ()
    """Names of steps and parts; empty: all but what is run on request alone."""
    quick: bool = False
    tests: Sequence[str] = ()
    """Arguments for pytest."""

    def takes(self, planned: Planned) -> bool:
        """Tell whether a step is to be run."""
        if self.only:
            return planned.part in self.only or planned.step.name in self.only
        return planned.part != "cliff" and not (self.quick and planned.part == "sanitizer")


class Packed:
    """Unpacks an engine that was taken along, while other steps run."""

    def __init__(self, folder: Path, site: Path, log: Path) -> None:
        wheels = sorted((folder / VLLM_WHEELS).glob("*.whl"))
        archives = [
            one for name in (VLLM_FILES, ATTENTION_FILES) if (one := folder / name).exists()
        ]
        packages = site / "packages"
        self.path = [site, packages] if wheels and archives else []
        """For PYTHONPATH."""
        commands: list[list[str]] = []
        if self.path:
            site.mkdir()
            commands = [["tar", "xJf", str(one), "-C", str(site)] for one in archives]
            if not (folder / ATTENTION_FILES).exists():
                # vLLM looks for a FlashAttention when it starts; nothing calls this one.
                there = site / "vllm" / "vllm_flash_attn"
                commands += [["mkdir", "-p", str(there)], ["touch", str(there / "_vllm_fa2_C.py")]]
            pip = "-m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target"
            commands.append([sys.executable, *pip.split(), str(packages), *map(str, wheels)])
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["bash", "-e", "-c", "\n".join(map(shlex.join, commands))],
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def there(self, timeout_s: float) -> bool:
        """Wait for it; whether all is unpacked."""
        try:
            return self._process.wait(max(0.0, min(UNPACK_S, timeout_s))) == 0
        except subprocess.TimeoutExpired:
            return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run(steps: Steps, planned: Sequence[Planned], packed: Packed | None) -> None:
    """Run the steps; those of engines when an engine is there."""
    for part, step in planned:
        needs_engine = part in ("engines", "cliff") or step.name == "engine-figures"
        if needs_engine and packed is not None and not packed.there(steps.left_s):
            steps.skip(step.name, f"the engine was not unpacked: see unpack.log in {LOGS}")
        else:
            steps.run(step)


def judge(steps: Steps, out: Path) -> None:
    """Judge what was measured, if anything was, however little time is left."""
    figures = gpu_judge.figures_in(out)
    if figures:
        lines, passed = gpu_judge.judge(figures)
        (out / JUDGE).write_text("\n".join([*lines, ""]))
        for line in lines:
            steps.say(line)
        steps.end_with("judge", 0 if passed else 1)


def summary(steps: Steps, output: str) -> tuple[list[str], int]:
    """Return what is to be said at the end, and the exit status."""
    skipped = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    lines = ["gpu-check: skipped:", *skipped] if skipped else []
    for became in (Became.NOT_RUN, Became.FAILED):
        names = ", ".join(ended.name for ended in steps.ended if ended.became is became)
        lines += [f"gpu-check: {became}: {names}"] * bool(names)
    ways = {ended.became for ended in steps.ended}
    if Became.FAILED in ways:
        return lines, 1
    if Became.NOT_RUN in ways:
        return lines, 3
    return [*lines, f"gpu-check: all passed{', but for what was skipped' * bool(skipped)}"], 0


def main() -> int:
    parser = ArgumentParser(prog="scripts/gpu-check", allow_abbrev=False)
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--limit", type=float, default=570.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    given, tests = parser.parse_known_args()
    options = Options(given.only.split(",") if given.only else (), given.quick, tests)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        out = Path(os.environ.get("OUT") or scratch)
        for result in RESULTS:  # nothing is judged that an earlier run left here
            (out / result).unlink(missing_ok=True)
        packed = (
            Packed(given.packed, scratch / "engine", scratch / "unpack.log")
            if given.packed
            else None
        )
        path = [os.environ.get("PYTHONPATH", ""), *map(str, packed.path if packed else ())]
        engine_env = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        every = list(plan(out, scratch, engine_env, options))
        known = {name for part, step in every for name in (part, step.name)}
        if unknown := set(options.only) - known:
            parser.error(
                f"--only {', '.join(sorted(unknown))}: must be of {', '.join(sorted(known))}"
            )
        try:
            with (out / OUTPUT).open("wb") as output:
                steps = Steps(given.limit, output)
                run(steps, [one for one in every if options.takes(one)], packed)
                judge(steps, out)
                lines, code = summary(steps, (out / OUTPUT).read_text(errors="replace"))
                for line in lines:
                    steps.say(line)
        finally:
            if packed is not None:
                packed.close()
            with tarfile.open(out / LOGS, "w:gz") as tar:
                for log in (*scratch.glob("*.log"), *scratch.glob("*/*.log")):
                    tar.add(log, log.relative_to(scratch))
    return code


if __name__ == "__main__":
    sys.exit(main())
