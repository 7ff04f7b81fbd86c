# For scripts that wait for something long: `while_saying WHAT COMMAND...` runs COMMAND and says on
# standard error every SAY_EVERY_S seconds that WHAT still goes on. To a terminal or a pipe alike.

SAY_EVERY_S=${SAY_EVERY_S:-10}

while_saying() {
    local what=$1 started=$SECONDS code=0 ticker
    shift
    (
        exec 9>&- # scripts/setup's lock: not held by a sleep that outlives us
        while sleep "$SAY_EVERY_S" >/dev/null 2>&1; do
            printf '%s: %d s so far\n' "$what" $((SECONDS - started)) >&2
        done
    ) &
    ticker=$!
    "$@" || code=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    return "$code"
}
