# again.sh -- sourced: starts a training, and starts it again where it left off.
#
# The caller defines launch(), which starts its arguments through watched() and leaves their exit code in $code.
# `again ./train_gpt2cu FLAGS` adds --resume 1 and starts them
#   - again after exit code 75: a rank got SIGUSR1, and all have saved;
#   - at most $RESTARTS [3] times after any other failure, but for those that would only repeat themselves: bad input
#     (2), divergence (3) and too little memory (4).
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to the script itself save a checkpoint and end it, with code 75.
code=0 pid='' stopped=false

# A session of its own keeps the terminal's Ctrl-C from the launcher, which might kill the ranks before they have saved.
watched() {
    setsid "$@" &
    pid=$!
    code=0
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do        # a signal ends `wait`, too
        code=0
        wait "$pid" || code=$?
    done
    pid=''
}

again() {
    local left=${RESTARTS:-3}
    trap 'stopped=true; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null || true' INT TERM HUP USR1
    while true; do
        launch "$@" --resume 1
        if $stopped || [[ $code =~ ^[0234]$ ]]; then break; fi
        if [ "$code" -eq 75 ]; then
            echo "stopped with a checkpoint; continuing from it" >&2
            continue
        fi
        [ "$left" -gt 0 ] || break
        left=$((left - 1))
        echo "ended with code $code; starting again from the newest checkpoint, $left more times at most" >&2
        sleep "${RESTART_WAIT:-10}"
        if $stopped; then break; fi
    done
    trap - INT TERM HUP USR1
    return "$code"
}
