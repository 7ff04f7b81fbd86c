"""Plans what the command of an engine needs for the store: what to add, what to merge, what to
refuse. Nothing is read or started here.

vLLM takes the last of several `--kv-transfer-config` without a word, one with a dot
(`--kv-transfer-config.NAME`) beats them all, and `--kv-offloading-size` replaces the connector of
any: so a second one is merged or refused, however it is spelt.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias, cast

from kvstore.cli.options import KEY_PREFIX_DEFAULT
from kvstore.errors import UsageError

Document: TypeAlias = dict[str, Any]
"""An engine's settings in JSON."""
CONNECTOR = "KVStoreConnector"
MULTI = "MultiConnector"
HAND_OVER = ("Nixl", "P2pNccl", "MoRIIO", "MooncakeConnector")
"""How connectors are called that load what another engine computed for this very request. They stay
before ours: the first that offers tokens loads them all."""
TRANSFER, OFFLOAD = "--kv-transfer-config", "--kv-offloading-size"
BACKEND = "--kv-offloading-backend"
OPTIONS = (TRANSFER, OFFLOAD, BACKEND)
STORAGE, EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
LAYOUT, TIER, TIER_TOO = "--hicache-mem-layout", "--enable-hierarchical-cache", "--enable-hicache"
OTHER_STORES = ("--enable-lmcache", "--enable-unified-cache-external-linker")
HICACHE_OPTIONS = (STORAGE, EXTRA, LAYOUT, TIER, TIER_TOO, *OTHER_STORES)
HICACHE = {
    "backend_name": "kvstore",
    "module_path": "connector.adapters.sglang",
    "class_name": "KVStoreHiCache",
    "interface_v1": 1,
}
SIMPLE_OFFLOAD = "VLLM_USE_SIMPLE_KV_OFFLOAD"
VARIABLES = re.compile(r"(\w+_)?(KV_TRANSFER_CONFIG|KV_OFFLOADING_SIZE)", re.IGNORECASE)
"""No engine reads one, but scripts that start engines do."""
ENVIRONMENT = "the environment"
WRAPPERS = {"chrt", "env", "ionice", "nice", "nohup", "numactl", "stdbuf", "taskset", "time", "uv"}
"""Commands that run what follows their options in this environment, on this host."""
MODULES = {
    ("vllm.entrypoints.openai.api_server",): "vLLM",
    ("vllm.entrypoints.cli.main", "serve"): "vLLM",
    ("sglang.launch_server",): "SGLang",
}
PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang"}
NOTHING = (None, "", "None")
"""Values of an option that say it is not wanted."""
NAME_CHARS_MIN = 5
"""Of an option that is cut short: engines know more than one that begins so."""
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_MODULE = re.compile(r"-[a-zA-Z]*m")
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


class Given(NamedTuple):
    """One option that is there already."""

    option: str
    spelt: str
    """As it was written, without its value."""
    where: str
    """In which file or variable; empty: in the command."""
    value: str | None
    words: range
    """Of the engine's arguments; empty where it is in none."""

    @property
    def path(self) -> list[str]:
        """Behind the dot."""
        return self.spelt.split(".")[1:]

    @property
    def name(self) -> str:
        """Before the dot, with dashes."""
        return self.spelt.partition(".")[0].replace("_", "-")

    def __str__(self) -> str:
        meant = "" if self.where == ENVIRONMENT or self.name == self.option else f" ({self.option})"
        return f"{self.spelt}{meant}" + (f" in {self.where}" if self.where else "")


def transfer_config(extra: Mapping[str, object]) -> Document:
    """Return vLLM's kv_transfer_config of the store, with these settings of the connector."""
    needed = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    whole: Document = {**needed, "kv_load_failure_policy": "recompute"}
    return {**whole, "kv_connector_extra_config": dict(extra)} if extra else whole


def entry(command: Sequence[str]) -> tuple[str, int] | None:
    """Return which engine's server `command` runs, and where the arguments of that begin; None when
    it is none that is known."""
    wrapped = bool(command) and PurePath(command[0]).name in WRAPPERS
    for i in range(len(command) if wrapped else min(len(command), 1)):
        name = PurePath(command[i]).name
        if name in PROGRAMS and [*command[i + 1 : i + 2]] == ["serve"]:
            return PROGRAMS[name], i + 2
        if _PYTHON.fullmatch(name) and (found := _of_python(command, i + 1)):
            return found
    return None


def _of_python(command: Sequence[str], i: int) -> tuple[str, int] | None:
    """Return what a Python runs whose arguments begin at `i`: a module, or a script by name."""
    while i < len(command) and command[i].startswith("-") and not _MODULE.fullmatch(command[i]):
        i += 2 if command[i] in ("-X", "-W") else 1
    rest = tuple(command[i:])
    if rest and _MODULE.fullmatch(rest[0]):
        for words, engine in MODULES.items():
            if rest[1 : 1 + len(words)] == words:
                return engine, i + 1 + len(words)
    elif rest[1:2] == ("serve",) and (engine := PROGRAMS.get(PurePath(rest[0]).name, "")):
        return engine, i + 2
    return None


def config_file(arguments: Sequence[str]) -> str | None:
    """Return the file whose options both engines put before those of the command."""
    if "--config" not in arguments[:-1]:
        return None
    return arguments[arguments.index("--config") + 1]


def config_words(config: object) -> list[str]:
    """Return the words that both engines make of such a file."""
    words: list[str] = []
    for key, value in config.items() if isinstance(config, dict) else ():
        words.append(f"--{key}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif isinstance(value, list):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return words


def given(arguments: Sequence[str], options: Sequence[str], where: str = "") -> Iterator[Given]:
    """Yield those of `options` that an engine finds in `arguments`: with underscores, cut short as
    argparse allows it, with `=` or with a dot."""
    last = list(arguments).index("--") if "--" in arguments else len(arguments)
    for i, word in enumerate(arguments[:last]):
        key, equals, value = word.partition("=")
        name = key.partition(".")[0].replace("_", "-")
        option = name if name in options else next((o for o in options if o.startswith(name)), "")
        if not word.startswith("--") or not option or len(name) < NAME_CHARS_MIN:
            continue
        follows = [] if equals else [w for w in arguments[i + 1 : last][:1] if w[:2] != "--"]
        words = range(0) if where else range(i, i + 1 + len(follows))
        yield Given(option, key, where, value if equals else next(iter(follows), None), words)


def planned(
    command: Sequence[str],
    config: object,
    environment: Mapping[str, str],
    *,
    key_prefix: str,
    merge: bool,
) -> list[str]:
    """Return `command` with what makes its engine use the store. `config` is what its `--config`
    names, as YAML.

    Raises `UsageError` where the command runs no engine that is known, and where the engine
    has a connector already, unless it can be merged and is to be.
    """
    found = entry(command)
    extra = {} if key_prefix == KEY_PREFIX_DEFAULT else {"key_prefix": key_prefix}
    if found is None:
        raise UsageError("command", shlex.join(command), how_to_add(extra))
    engine, at = found
    head, arguments = list(command[:at]), list(command[at:])
    file = config_file(arguments) or "the --config file"
    if engine == "SGLang":
        there = [*given(config_words(config), HICACHE_OPTIONS, file)]
        there += given(arguments, HICACHE_OPTIONS)
        return [*head, *_with(arguments, _for_sglang(there, extra, merge))]
    variables = [f"{n}={v}" for n, v in environment.items() if v and VARIABLES.fullmatch(n)]
    variables += [w for w in head if VARIABLES.fullmatch(w.partition("=")[0])]
    there = [
        Given(OFFLOAD if name[-1] in "eE" else TRANSFER, name, ENVIRONMENT, value, range(0))
        for name, _, value in (word.partition("=") for word in variables)
    ]
    there += [*given(config_words(config), OPTIONS, file), *given(arguments, OPTIONS)]
    said = [g for g in there if g.option != BACKEND and (g.path or g.value not in NOTHING)]
    ours = transfer_config(extra)
    if not said:
        return [*head, *_with(arguments, [TRANSFER, json.dumps(ours)])]
    if not merge:
        must = "the engine has a KV connector already: leave it out, or use both with --merge"
        raise _refused(said, must)
    for one in said:
        if one.path and one.where:
            raise UsageError("command", str(one), "cannot be merged: write it without a dot")
    theirs = _theirs(there, environment)
    out = {i for g in said for i in g.words}
    arguments = [word for i, word in enumerate(arguments) if i not in out]
    added = [TRANSFER, json.dumps(ours if theirs is None else merged(theirs, ours))]
    if any(g.option == OFFLOAD and g.where for g in said):
        added += [OFFLOAD, "None"]
    return [*head, *_with(arguments, added)]


def _refused(said: Sequence[Given], must: str) -> UsageError:
    others = "".join(f"; so has {one}" for one in said[1:])
    return UsageError("command", str(said[0]), must + others)


def how_to_add(extra: Mapping[str, object]) -> str:
    """Return what a command needs that is not known here."""
    return (
        "is no `vllm serve`, no `sglang serve` and none of their modules, so nothing was started. "
        "Start the store with `kvstore up`, which prints the KVSTORE_URL to set, and give the "
        f"engine, vLLM: {shlex.join([TRANSFER, json.dumps(transfer_config(extra))])}; "
        f"SGLang: {shlex.join(_for_sglang([], extra, False))}; another: docs/engines.md"
    )


def _with(arguments: list[str], added: list[str]) -> list[str]:
    """Return `arguments` with `added` behind the last option."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], *added, *arguments[at:]]


# --- vLLM -------------------------------------------------------------------


def _theirs(there: Sequence[Given], environment: Mapping[str, str]) -> Document | None:
    """Return the kv_transfer_config that vLLM makes of the options; None when it makes none."""
    last = {g.option: g.value for g in there if not g.path}
    documents = [] if last.get(TRANSFER) in NOTHING else [_document(str(last[TRANSFER]))]
    dotted: dict[str, Document] = {}
    for one in there:
        if one.path:
            _update(dotted.setdefault(one.name, {}), _nested(one))
    theirs = [None, *documents, *dotted.values()][-1]
    size = last.get(OFFLOAD)
    if size in NOTHING:
        return theirs
    theirs = {**(theirs or {}), "kv_role": "kv_both"}
    if last.get(BACKEND) == "lmcache":
        return {**theirs, "kv_connector": "LMCacheMPConnector"}
    simple = environment.get(SIMPLE_OFFLOAD, "0") not in ("", "0")
    theirs["kv_connector"] = "SimpleCPUOffloadConnector" if simple else "OffloadingConnector"
    try:
        bytes_to_use = {"cpu_bytes_to_use": float(str(size)) * (1 << 30)}
    except ValueError:
        raise UsageError("command", f"{OFFLOAD} {size}", "is no number of GiB") from None
    extra = theirs.get("kv_connector_extra_config") or {}
    return {**theirs, "kv_connector_extra_config": {**extra, **bytes_to_use}}


def _document(raw: str) -> Document:
    try:
        document = json.loads(raw)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UsageError("command", raw, "cannot be merged: it is no object in JSON")
    return document


def _nested(one: Given) -> Document:
    """Return what an option with dots says."""
    raw, path = one.value or "", one.path
    suffixed = _SUFFIXED.fullmatch(raw.strip())
    value: object = raw
    if path[-1].endswith("+"):
        value, path[-1] = raw.split(","), path[-1][:-1]
    elif suffixed:  # 80G: powers of 1,024 for capitals, of 1,000 for small letters
        unit = (1024 if suffixed[2].isupper() else 1000) ** ("kmgt".index(suffixed[2].lower()) + 1)
        value = int(float(suffixed[1]) * unit)
    else:
        with suppress(ValueError):
            value = json.loads(raw)
    for name in reversed(path):
        value = {name: value}
    return cast("Document", value)


def _update(document: Document, more: Document) -> None:
    """Add `more`: objects are merged, lists grow, all else is replaced."""
    for name, value in more.items():
        there = document.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            _update(there, value)
        elif isinstance(there, list) and isinstance(value, list):
            there += value
        else:
            document[name] = value


def merged(theirs: Document, ours: Document) -> Document:
    """Return a kv_transfer_config with both, where theirs is not the store's already. A failed load
    is computed again, whatever theirs says: only the top level's word counts."""
    policy = {"kv_load_failure_policy": "recompute"}
    connector = theirs.get("kv_connector")
    if connector is None:
        return {**theirs, **ours}
    extra = dict(theirs.get("kv_connector_extra_config") or {})
    # Of a child vLLM takes no engine_id beside the one that it gives.
    top = {name: theirs[name] for name in ("engine_id", "kv_role") if name in theirs}
    child = {name: value for name, value in theirs.items() if name not in ("engine_id", *policy)}
    children = list(extra.pop("connectors", ())) if connector == MULTI else [child]
    if any(one.get("kv_connector") == CONNECTOR for one in children):
        return {**theirs, **policy}
    hands_over = [str(one.get("kv_connector")).startswith(HAND_OVER) for one in children]
    mine = {name: value for name, value in ours.items() if name not in policy}
    children.insert(hands_over.index(False) if False in hands_over else len(children), mine)
    extra["connectors"] = children
    return {"kv_connector": MULTI, "kv_role": "kv_both", **top, **policy} | {
        "kv_connector_extra_config": extra
    }


# --- SGLang -----------------------------------------------------------------


def _for_sglang(there: Sequence[Given], extra: Mapping[str, object], merge: bool) -> list[str]:
    """Return the flags that SGLang lacks. It has one storage, so another one is always refused."""
    last = {g.option: g for g in there}
    ours: dict[str, object] = {**HICACHE, **extra}
    for option in OTHER_STORES:
        if option in last:
            raise UsageError("command", str(last[option]), "is another store, and SGLang has one")
    if STORAGE in last and last[STORAGE].value != "dynamic":
        shown = f"{last[STORAGE]} {last[STORAGE].value}"
        raise UsageError("command", shown, "is another store, and SGLang has one")
    said = [last[option] for option in (STORAGE, EXTRA) if option in last]
    if said and not merge:
        must = "the engine has a storage already: leave it out, or keep its settings with --merge"
        raise _refused(said, must)
    if EXTRA in last:
        theirs = _document(last[EXTRA].value or "")
        if theirs.get("class_name", HICACHE["class_name"]) != HICACHE["class_name"]:
            raise UsageError("command", str(last[EXTRA]), "is another store, and SGLang has one")
        ours = {**ours, **theirs}
    flags = [] if {TIER, TIER_TOO} & last.keys() else [TIER]
    flags += [] if LAYOUT in last else [LAYOUT, "page_first"]
    return [*flags, STORAGE, "dynamic", EXTRA, json.dumps(ours)]
