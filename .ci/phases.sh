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

fresh() { # name, requirements...: a new virtual environment with the newest pip
    python3 -m venv "$work/$1"
    install "$1" --upgrade pip
    install "$@"
}

wheel() { # builds sdist and wheel; $wheel is its path
    fresh build build twine
    "$work/build/bin/python" -m build -o "$work/dist" . >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log"; exit 1; }
    "$work/build/bin/twine" check --strict "$work/dist/"*
    wheel=$(ls "$work/dist/"*.whl)
    rm -rf "$work/build"
}

newest_with_tests() { # name of an environment: the newest releases, with the trl, peft and datasets of LLaMA-Factory 0.9.5
    install "$1" -e ".[test-core]" torchvision torchaudio deepspeed "datasets==4.0.0" "trl==0.24.0" "peft==0.18.1" omegaconf "torchdata==0.11.0"
    install "$1" --no-deps "llamafactory==0.9.5"
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
