"""Serves a steady load by engines while faults strike the store, and compares every answer.

The memory node and Redis are killed and paused, records are forged, and men in the middle change
what Redis answers and what two hosts say to each other.

Two engines with the connector share one node and one Redis; one is on the node's host, the other
reaches it as from another host, by streams that a secret seals. Afterwards an engine without a
store answers the same prompts, and every answer must be its answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from demo_model import MODEL
from engines import EngineProcess, EngineSettings, build_model, kv_transfer
from services import Service, node_command, node_up, redis_command, redis_up

from chaos import plan
from chaos.load import Load, ask
from chaos.neighbours import Neighbours
from chaos.report import draw, show
from kvstore import Client
from kvstore.errors import IndexUnavailableError, PeerError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import open_index
from kvstore.record import unpack_record
from kvstore.testing.crash.workers import WorkerPlace
from kvstore.testing.forgery import forge
from kvstore.testing.proxy import FaultyProxy

ENGINES = 2
FAR_ENGINE = 1
"""This one is on another host than the node."""
NODE_BYTES = 1 << 30
ASK_TIMEOUT_S = 1.0
LISTED_MAX = 256
LIE_EVERY_S = 0.05
FLIP_CHANCE = 0.3
"""That somebody changes a bit of one answer of Redis."""
TAMPER_CHANCE = 0.2
"""That somebody between the hosts does something to a chunk, of 64 KiB at most: blocks of a small
model are few of them."""
TAMPER_HOLDS_S = 0.5
HERE_HOST, BETWEEN_HOST = "127.0.0.1", "127.0.0.2"
"""The node listens at one and says that it is at the other, where the man in the middle is."""
KEY_PREFIX = "kv:chaos"
NEIGHBOUR_RESTS_S = 0.05
"""Between two calls: they are to be rude, not many."""
LIB = Path(__file__).parents[1]


class Store:
    """Owns the memory node and Redis: processes to be killed, paused and started again."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvc-"))
        self.socket = self.run_dir / "redis.sock"
        self.far_run_dir = Path(tempfile.mkdtemp(prefix="kvc-"))
        """Of the other host."""
        self.environment = {"KVSTORE_SECRET": secrets.token_hex()}
        self.services: dict[str, Service] = {}
        self.forged = self.flipped = self.tampered = 0
        self.between = FaultyProxy(self._to_node, address=(BETWEEN_HOST, 0))
        self.start("redis")
        self.start("node")
        self.wire = FaultyProxy(self._to_redis)

    @property
    def engines_url(self) -> str:
        """Return Redis' URL for engines: past somebody who may change what Redis answers."""
        host, port = self.wire.address
        return f"redis://{host}:{port}"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self, who: str) -> None:
        if who == "redis":
            up = redis_up(self.socket)
            command = redis_command(self.run_dir, "--port", "0", "--unixsocket", str(self.socket))
        else:
            up = node_up(self.run_dir)
            command = node_command(
                self.run_dir,
                NODE_BYTES,
                *("--url", self.url, "--key-prefix", KEY_PREFIX),
                *("--end-with-parent", str(os.getpid())),
                *("--listen", f"{HERE_HOST}:{self.between.address[1]}"),
                *("--advertise", BETWEEN_HOST),
            )
        log = self.out / f"{who}.log"
        service = self.services[who] = Service(command, log, env=self.environment, more_log=True)
        service.wait(up)

    def send(self, who: str, number: signal.Signals) -> None:
        self.services[who].send(number)

    def end(self, who: str, number: signal.Signals) -> None:
        self.send(who, number)
        self.services[who].end(number)

    def carry_out(self, fault: plan.Fault) -> None:
        """Make the fault happen, from its beginning to its end: everything runs again on return."""
        if fault.kind == plan.LIE:
            self.forged += self._lie(fault.lasts_s)
            return
        if fault.kind == plan.FLIP:
            self.wire.flip = self._flip
            time.sleep(fault.lasts_s)
            self.wire.flip = None
            return
        if fault.kind == plan.TAMPER:
            self.between.flip = self.between.flip_requests = self._tamper
            time.sleep(fault.lasts_s)
            self.between.flip = self.between.flip_requests = None
            return
        victims = ("redis", "node") if fault.victim == "both" else (fault.victim,)
        if fault.kind == "pause":
            for who in victims:
                self.send(who, signal.SIGSTOP)
            time.sleep(fault.lasts_s)
            for who in victims:
                self.send(who, signal.SIGCONT)
            return
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
        for who in reversed(victims):
            self.end(who, number)
        time.sleep(fault.lasts_s)
        for who in victims:
            self.start(who)

    def _lie(self, for_s: float) -> int:
        """Forge the records of all blocks, again and again; return how many were forged."""
        forged, over_at = 0, time.monotonic() + for_s
        rng = random.Random(for_s)
        index = open_index(self.url, key_prefix=KEY_PREFIX, timeout_s=ASK_TIMEOUT_S)
        with (
            Client(self.url, key_prefix=KEY_PREFIX, run_dir=self.run_dir) as client,
            contextlib.closing(index),
        ):
            while time.monotonic() < over_at:
                with contextlib.suppress(PeerError, IndexUnavailableError):
                    keys = [row.key for row in client.session.writer.listing(b"", LISTED_MAX)]
                    records = zip(keys, index.lookup(keys), strict=True)
                    known = [unpack_record(key, record) for key, record in records if record]
                    places = [place for place in known if place is not None]
                    lies = [KeyRecord(key, forge(key, rng, places)) for key in keys if places]
                    index.publish(lies)
                    forged += len(lies)
                time.sleep(LIE_EVERY_S)
        return forged

    def _flip(self, chunk: bytearray) -> None:
        if random.random() < FLIP_CHANCE:
            chunk[random.randrange(len(chunk))] ^= 1 << random.randrange(8)
            self.flipped += 1

    def _tamper(self, chunk: bytearray) -> None:
        """Change bytes of what one host says to another: the seals must tell, whatever is
        changed."""
        if random.random() >= TAMPER_CHANCE:
            return
        self.tampered += 1
        start, end = sorted(random.randrange(len(chunk) + 1) for _ in range(2))
        match random.randrange(6):
            case 0:
                chunk[start - 1] ^= 1 << random.randrange(8)
            case 1:
                del chunk[start:end]
            case 2:
                chunk[end:end] = chunk[start:end]
            case 3:
                chunk[:] = chunk[end:] + chunk[start:end] + chunk[:start]
            case 4:
                time.sleep(random.uniform(0, TAMPER_HOLDS_S))
            case _:
                raise OSError("cut off")

    def neighbours(self, seed: int) -> Neighbours:
        """Start what else uses the store: one here, one on the other host."""
        here = WorkerPlace(self.engines_url, self.run_dir, KEY_PREFIX, NEIGHBOUR_RESTS_S)
        places = [here, here._replace(run_dir=self.far_run_dir)]
        return Neighbours(places, self.environment, seed)

    def _to_node(self) -> socket.socket:
        return socket.create_connection((HERE_HOST, self.between.address[1]), ASK_TIMEOUT_S)

    def _to_redis(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.socket))
        return connection

    def close(self) -> None:
        self.wire.close()
        self.between.close()
        for who, service in reversed(self.services.items()):
            if not service.end():
                print(f"chaos: {who} had to be killed", file=sys.stderr)
        for run_dir in (self.run_dir, self.far_run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)


def start_engines(
    options: argparse.Namespace, store: Store, stack: contextlib.ExitStack
) -> list[EngineProcess]:
    """Start the engines with the store, and last the one without; `stack` ends those that
    started."""
    model = options.out / "model"
    if not options.no_engine:
        build_model(model, MODEL)
    cores = sorted(os.sched_getaffinity(0))

    def launch(number: int) -> EngineProcess:
        run_dir = store.far_run_dir if number == FAR_ENGINE else store.run_dir
        extra = {"url": store.engines_url, "run_dir": str(run_dir), "key_prefix": KEY_PREFIX}
        settings = EngineSettings(
            connector=kv_transfer(**extra, block_tokens=plan.BLOCK) if number < ENGINES else None,
            in_process=False,
            max_batched_tokens=plan.BLOCK,
            max_model_len=MODEL.context_tokens,
            prefix_caching=False,
            cpus=str(cores[number % len(cores)]),
            env=store.environment,
        )
        program = LIB / ("synthetic.py" if options.no_engine else "engines.py")
        log = options.out / f"engine-{number}.log"
        engine = EngineProcess(model, settings, log, program, fresh=options.no_engine)
        stack.callback(engine.close)
        return engine

    # One that starts keeps two cores busy, and what takes its turn has all of its time for itself.
    with ThreadPoolExecutor(max(1, len(cores) // 2)) as pool:
        return list(pool.map(launch, range(ENGINES + 1)))


def run(options: argparse.Namespace, planned: list[plan.Fault]) -> int:
    with contextlib.ExitStack() as stack:
        store = Store(options.out)
        stack.callback(store.close)
        neighbours = store.neighbours(options.seed)
        stack.callback(neighbours.close)
        try:
            *engines, alone = start_engines(options, store, stack)
        except RuntimeError as e:
            print(f"chaos: {e}", file=sys.stderr)
            return 1
        for engine in (*engines, alone):  # the first request of an engine is slower
            ask(engine, plan.NEW, (2,) * (plan.BLOCK + plan.TAIL_TOKENS), 0.0)
        load = Load(engines, options.seed)
        windows: list[plan.Window] = []
        try:
            for fault in planned:
                time.sleep(max(0.0, load.started + fault.at_s - time.monotonic()))
                began_s = time.monotonic() - load.started
                store.carry_out(fault)
                windows.append(plan.Window(fault, began_s, time.monotonic() - load.started))
                print(f"{began_s:6.1f} s  {fault.kind} {fault.victim}", file=sys.stderr)
            time.sleep(max(0.0, load.started + options.seconds - time.monotonic()))
        finally:
            load.stop()
        neighbours.settle()
        rude = neighbours.summary()
        neighbours.close()
        print(f"{len(load.answers)} requests; the engine without a store", file=sys.stderr)
        asked = sorted({answer.prompt for answer in load.answers})
        random.Random(options.seed).shuffle(asked)
        reference = [ask(alone, plan.NEW, prompt, load.started) for prompt in asked]
    right = {answer.prompt: answer.tokens for answer in reference if answer.tokens is not None}
    computed_s = [answer.ttft_s for answer in reference if answer.tokens is not None]
    summary = {"seed": options.seed, "seconds": options.seconds}
    summary |= {"forged_records": store.forged, "changed_answers": store.flipped}
    summary |= {"changed_streams": store.tampered, "streams": store.between.accepted}
    summary |= {"given_up": load.given_up, "neighbours": rude}
    summary |= plan.judge(load.answers, right, windows, computed_s)
    for error in {answer.error for answer in load.answers if answer.error}:
        print(f"chaos: not answered: {error}", file=sys.stderr)
    text = show(summary)
    (options.out / "chaos.txt").write_text(text)
    print(text, file=sys.stderr)
    draw(load.answers, windows, summary, options.out / "chaos.png")
    print(json.dumps(summary))
    return 0 if plan.passed(summary, len(planned)) and store.between.accepted else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of load (120)")
    parser.add_argument("--seed", type=int, help="of faults and prompts (printed)")
    parser.add_argument("--no-engine", action="store_true", help="synthetic blocks, no vLLM")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"), help="logs and the picture")
    options = parser.parse_args()
    if not options.no_engine and find_spec("vllm") is None:
        print("chaos: vLLM is not installed here; `--no-engine` does without", file=sys.stderr)
        return 2
    if options.seed is None:
        options.seed = secrets.randbits(32)
    planned = plan.faults(options.seed, options.seconds)
    if not planned:
        parser.error(f"--seconds {options.seconds:g} leaves no time for a fault")
    print(f"seed {options.seed}, {len(planned)} faults", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return run(options, planned)


if __name__ == "__main__":
    sys.exit(main())
