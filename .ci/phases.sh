# Sourced by the scripts of this folder: phases that are timed, and virtual environments that end with the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # with it every process would compile anew what it imports
work=$(mktemp -d)
times=()

phase() { # name: begin a phase; the end prints how many minutes each has taken
    end_phase
    current=$1
    began=$SECONDS
    echo "== $1"
}

end_phase() {
    [[ -z ${current:-} ]] && return
    times+=("$(awk -v s=$((SECONDS - began)) -v name="$current" 'BEGIN { printf "%6.1f  %s", s / 60, name }')")
    current=
}

finish() {
    local code=$?
    end_phase
    echo "== minutes by phase"
    printf '%s\n' "${times[@]}" "$(awk -v s=$SECONDS 'BEGIN { printf "%6.1f  all", s / 60 }')"
    rm -rf "$work"
    exit $code
}
trap finish EXIT

fresh() { # name, requirements...: a new virtual environment
    python3 -m venv "$work/$1"
    install "$@"
}

install() { # name, requirements...: into a virtual environment; pip's output is shown if it fails
    # Modules are compiled when they are imported, which most never are.
    local name=$1
    shift
    if ! "$work/$name/bin/pip" install -q --no-compile "$@" >"$work/$name.log" 2>&1; then
        tail -n 40 "$work/$name.log"
        return 1
    fi
    "$work/$name/bin/pip" list 2>/dev/null |
        grep -iE '^(odb|llamafactory|torch|transformers|accelerate|datasets|deepspeed|peft|trl) ' || true
}
