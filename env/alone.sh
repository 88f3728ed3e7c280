# Sourced by setup.sh and venv.sh: one set-up of an environment at a time, and from what pip finds where it looks.

# What pip is told by variables that the set-up keeps: where packages come from, by which road, and what it prints. A
# constraint, another target or a way to build, as containers and shells export them for packages of their own, is none.
firsttoken_pip_keeps="INDEX_URL EXTRA_INDEX_URL FIND_LINKS NO_INDEX TRUSTED_HOST PROXY CERT CLIENT_CERT KEYRING_PROVIDER
    CACHE_DIR NO_CACHE_DIR TIMEOUT DEFAULT_TIMEOUT RETRIES RESUME_RETRIES CONFIG_FILE NO_INPUT PROGRESS_BAR QUIET VERBOSE LOG
    NO_COLOR DISABLE_PIP_VERSION_CHECK ROOT_USER_ACTION USE_FEATURE USE_DEPRECATED"
for firsttoken_name in $(compgen -A export PIP_); do
    [[ " $(echo $firsttoken_pip_keeps) " == *" ${firsttoken_name#PIP_} "* ]] || unset "$firsttoken_name"
done
unset PYTHONHOME PYTHONUSERBASE # Python would look elsewhere first
export PIP_USER=0 PIP_NO_DEPS=0 # also where a file of pip's says otherwise

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
