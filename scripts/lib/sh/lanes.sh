# Tests in lanes side by side, whose output is shown when they end. To be sourced, in the checkout's
# root; wants `bin`, the environment's programs.

SLACK=6     # times the processor time of an item that is not long: machines differ
ALONE_MAX=5 # tests of a part that may run once more alone: more than that is no bad luck

logs=$(mktemp -d)
declare -A lanes
# A signal ends a script that waits for a lane at once, and with it all that it has started.
trap 'exit 143' TERM
trap 'exit 130' INT
trap end_lanes EXIT

# PROCESS: the processes that it has started, each before those that it has: a lane that outlived
# its test would begin the next.
started() {
    local child
    for child in $(pgrep -P "$1" || true); do
        echo "$child"
        started "$child"
    done
}

end_lanes() {
    local process
    for process in $(started $$); do
        kill "$process" 2>/dev/null || true
    done
    rm -rf "$logs"
}

step() {
    printf -- '-- %s\n' "${*//"$bin/"/}"
    "$@"
}

# MARK: the files of tests that have it. Others need not be imported to find them.
marked() {
    grep -rl --include='test_*.py' "mark\.$1" tests | sort
}

# COMMAND...: run it, with what it prints shown as it comes. A signal does not wait for its end.
shown() {
    "$@" &
    wait $!
}

# NAME ARGS...: pytest, which notes under NAME with what it ran and what failed. Ends after
# TESTS_TIMEOUT, if that is set.
tests() {
    local name=$1 rc=0
    shift
    printf '%s\n' "$@" >"$logs/$name.args"
    step timeout --kill-after=30s "${TESTS_TIMEOUT:-0}" \
        "$bin/pytest" -o cache_dir="$logs/$name.cache" -o processor_slack="$SLACK" --durations=12 "$@" || rc=$?
    echo $rc >"$logs/$name.rc"
}

# PART...: run those that no other lane has taken, in this order. Each is a function, or a folder
# that the function `folder` has tested. A lane that is done early takes what is left, so nobody need
# know how long a part takes, as long as the longest are named first.
take() {
    local part name rc
    for part in "$@"; do
        name=${part//\//-}
        mkdir "$logs/$name.taken" 2>/dev/null || continue
        rc=0
        if [[ -d $part ]]; then folder "$part" "$name"; else $part; fi || rc=$?
        [[ -e $logs/$name.rc ]] || echo $rc >"$logs/$name.rc"
    done
}

# LANE...: each is a function, and a process from here on.
begin() {
    local lane
    for lane in "$@"; do
        $lane >"$logs/$lane" 2>&1 &
        lanes[$lane]=$!
    done
}

# LANE...: wait for them, in this order, and show what they said. Fails when one did.
finish() {
    local lane failed=0
    for lane in "$@"; do
        wait "${lanes[$lane]}" || failed=1
        unset "lanes[$lane]"
        printf -- '-- lane: %s\n' "$lane"
        cat "$logs/$lane"
    done
    return $failed
}

# NAME...: fails when tests under one of these names did. Deadlines pass by the clock, and the lanes
# are more than two cores: what failed beside the others, if it is little, runs once more alone.
# What fails twice fails.
again_alone() {
    local name rc count failed=0 args
    for name in "$@"; do
        name=${name//\//-}
        rc=$(cat "$logs/$name.rc" 2>/dev/null || echo none)
        [[ $rc == 0 ]] && continue
        count=$(grep -c '": true' "$logs/$name.cache/v/cache/lastfailed" 2>/dev/null || true)
        if [[ $rc != 1 ]] || ((${count:-0} == 0 || count > ALONE_MAX)); then
            printf -- '-- failed: %s (exit status %s, %s tests)\n' "$name" "$rc" "${count:-no}"
            failed=1
            continue
        fi
        printf -- '-- failed beside others, once more alone: %s\n' "$name"
        mapfile -t args <"$logs/$name.args"
        step "$bin/pytest" -o cache_dir="$logs/$name.cache" --last-failed "${args[@]}" || failed=1
    done
    return $failed
}
