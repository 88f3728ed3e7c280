# Sourced by setup.sh and venv.sh: one set-up of an environment at a time.

# firsttoken_alone ROOT VENV: wait until no other process sets VENV up, and say so where one does. The lock is that of the
# open file 9, which the programs that are started from here share, so that a pip whose shell was killed keeps it until it
# has ended. VENV.lock stays, and says nothing when nobody has it open. macOS has no program `flock`; any Python 3 does.
firsttoken_alone() {
    local root="$1" venv="$2" python
    for python in ${PYTHON:+"$PYTHON"} python3 python "$venv/bin/python"; do
        if "$python" -c 'import fcntl, sys; sys.exit(sys.version_info < (3, 7))' >/dev/null 2>&1; then
            exec 9<>"$venv.lock"
            "$python" -I "$root/lib/firsttoken/study/system/alone.py" 9 "sets up $(basename -- "$venv")"
            return
        fi
    done
}

# Let the next one set up.
firsttoken_done() { exec 9>&-; }
