"""Compares the turns of a scenario with the engine without a store, and makes rows of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Row, median, percentile
from benchmarks.serving.engines import Answer
from benchmarks.serving.replay import Turn
from benchmarks.serving.sessions import Load

REFERENCE = "none"
OURS = "kvstore"
FLOOR = "floor"
"""Whose answers are wrong on purpose: it bounds what a store can gain."""
ROUNDING = "bfloat16"
"""The type in which rounding alone gives other answers."""
TIE_GAPS = {"bfloat16": 0.1, "float32": 1e-3}
"""Two log-probabilities that differ by less are equal within the noise of the type: of one prompt
computed whole and in two pieces they differed by up to 0.06 in bfloat16, and either may be off.
One wrong block of KV moved them by 0.4 to 1.9."""
TURNS_MIN = 3
STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Of 95%, two-sided, by degrees of freedom; beyond: `STUDENT_T_MANY`."""
STUDENT_T_MANY = 2.262


def judge(reference: Answer, answer: Answer, tie_gap: float) -> str:
    """Return `equal`, `tie`, `wrong` or `error`, by the first token that differs.

    A tie: the other token is the reference's second best there, and no worse than noise. What
    follows a tie is another text, and is not compared.
    """
    if answer.error is not None or reference.error is not None:
        return "error"
    if answer.tokens == reference.tokens:
        return "equal"
    pairs = zip(reference.tokens, answer.tokens, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None or at >= len(reference.best) or len(reference.best[at]) < 2:
        return "wrong"
    (best, _), (second, runner_up) = reference.best[at][:2]
    return "tie" if answer.tokens[at] == runner_up and best - second <= tie_gap else "wrong"


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds what one scenario gave."""

    scenario: str
    turns: Mapping[str, Sequence[Turn]]
    """By connector."""
    reference: Turn | None
    """The engine without a store, under the same load."""
    load: Load
    dtype: str


def rows(measured: Measured) -> list[Row]:
    """Return one row for each connector: medians over its turns, sums of what went wrong."""
    return [_row(measured, connector) for connector in measured.turns]


def _row(measured: Measured, connector: str) -> Row:
    taken, load = measured.turns[connector], measured.load
    ours = measured.turns.get(OURS, ())
    ran = [turn for turn in taken if turn.reason is None]
    failed = next((turn.reason for turn in taken if turn.reason is not None), None)
    row: Row = {"scenario": measured.scenario, "connector": connector}
    if not ran:
        return row | {"turns": 0, "said": failed}
    answers = [a for turn in ran for a in turn.answers.values() if a.error is None]
    ttft_s = [a.ttft_s for a in answers]
    reference = None if connector == FLOOR else measured.reference
    verdicts = _verdicts(ran, reference, TIE_GAPS[measured.dtype])
    walls = [turn.wall_s for turn in ran]
    said = [failed] if failed else []
    if not all(turn.over for turn in ran):
        said.append(f"not over after {max(walls):.0f} s")
    if connector == OURS and len(ran) < TURNS_MIN:
        said.append(f"{len(ran)} of {TURNS_MIN} turns: no interval, too few to tell")
    if connector != OURS and any(turn.reason is None for turn in ours):
        said.append(_told(taken, ours))
    if connector == FLOOR:
        said += _bound(taken, measured)
    if verdicts and "wrong" in verdicts and measured.dtype == ROUNDING:
        said.append(f"{ROUNDING}: `wrong` may be rounding, --dtype float32 tells")
    return row | {
        "wall_s": round(median(walls), 1),
        "wall_s_least": round(min(walls), 1),
        "wall_s_most": round(max(walls), 1),
        "tokens_per_s": round(load.prompt_tokens / median(walls)),
        "ttft_s_p50": round(percentile(ttft_s, 50), 3) if ttft_s else None,
        "ttft_s_p99": round(percentile(ttft_s, 99), 3) if ttft_s else None,
        "hit": round(sum(a.cached_tokens for a in answers) / load.prompt_tokens / len(ran), 4),
        "hit_possible": round(load.hit_possible, 4),
        "engine_cpu_s": round(median([turn.engine_cpu_s for turn in ran]), 1),
        "store_cpu_s": round(median([turn.store_cpu_s for turn in ran]), 2),
        "equal": verdicts and verdicts.count("equal"),
        "ties": verdicts and verdicts.count("tie"),
        "wrong": verdicts and verdicts.count("wrong"),
        "errors": sum(a.error is not None for turn in ran for a in turn.answers.values()),
        "turns": len(ran),
        "said": "; ".join(said),
    }


def _verdicts(ran: Sequence[Turn], reference: Turn | None, tie_gap: float) -> list[str] | None:
    if reference is None or reference.reason is not None:
        return None
    return [
        judge(reference.answers[name], answer, tie_gap)
        for turn in ran
        for name, answer in turn.answers.items()
        if name in reference.answers
    ]


def _told(taken: Sequence[Turn], ours: Sequence[Turn]) -> str:
    """Say how many times as fast ours is, turn by turn, and whether the turns can tell."""
    ratios = _times_as_fast(taken, ours)
    if not ratios:
        return f"no turn in which {OURS} ran too"
    middle, interval = ratio_interval(ratios)
    text = f"{OURS} {middle:.2f} times as fast"
    if interval is None:
        return f"{text} in {len(ratios)} of {TURNS_MIN} turns: no interval, too few to tell"
    low, high = interval
    text += f" ({low:.2f} to {high:.2f}, 95%)"
    return text if low > 1 or high < 1 else f"{text}: too small a run to tell"


def _bound(floor: Sequence[Turn], measured: Measured) -> list[str]:
    """Say how many times as fast as the best peer a store could be that costs nothing."""
    peers = {
        connector: turns
        for connector, turns in measured.turns.items()
        if connector not in (REFERENCE, FLOOR)
        and not connector.startswith(OURS)
        and _times_as_fast(turns, floor)
    }
    if not peers:
        return []
    best = min(peers, key=lambda c: median([t.wall_s for t in peers[c] if t.reason is None]))
    middle, interval = ratio_interval(_times_as_fast(peers[best], floor))
    within = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f}, 95%)"
    return [f"no store can be more than {middle:.2f}{within} times as fast as {best}"]


def _times_as_fast(slow: Sequence[Turn], fast: Sequence[Turn]) -> list[float]:
    """Return how many times as fast the second is, of each turn in which both ran."""
    return [
        other.wall_s / own.wall_s
        for other, own in zip(slow, fast, strict=False)
        if other.reason is None and own.reason is None
    ]


def ratio_interval(ratios: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Return the geometric mean of ratios taken turn by turn, and its 95% interval (Student's).

    None instead of an interval for fewer than `TURNS_MIN`.
    """
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < TURNS_MIN:
        return math.exp(middle), None
    t = STUDENT_T.get(len(logs) - 1, STUDENT_T_MANY)
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), (math.exp(middle - half), math.exp(middle + half))


COLUMNS = (
    "connector",
    "wall_s",
    "tokens_per_s",
    "ttft_s_p50",
    "ttft_s_p99",
    "hit",
    "engine_cpu_s",
    "store_cpu_s",
    "equal",
    "ties",
    "wrong",
    "errors",
    "turns",
    "said",
)


SECTION = "## serve"


def into_document(text: str, tables: str) -> str:
    """Return the text of docs/benchmarks.md with these tables as its section on `serve`."""
    before, found, rest = text.partition(f"{SECTION}\n")
    _, following, after = rest.partition("\n## ") if found else ("", "", "")
    section = f"{SECTION}\n\n`scripts/bench serve --docs` wrote this: {tables.rstrip()}\n"
    return f"{before.rstrip()}\n\n{section}" + (f"\n## {after}" if following else "")


def markdown(about: Mapping[str, object], made: Sequence[Row]) -> str:
    """Return the tables of docs/benchmarks.md: one for each scenario."""
    lines = [", ".join(f"{name} {value}" for name, value in about.items()) + ".", ""]
    for scenario in dict.fromkeys(row["scenario"] for row in made):
        lines += [f"### `--scenario {scenario}`", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        for row in made:
            if row["scenario"] == scenario:
                cells = ["" if row.get(c) is None else str(row[c]) for c in COLUMNS]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
