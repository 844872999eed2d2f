# Sourced by the scripts that create virtual environments, from the project's root: what they have in common.
# pip brings PyTorch, from where its own configuration says, and uv; uv brings everything else, in a third of the time,
# and links what several environments have instead of copying it.

uv='uv==0.13.9'
torch='torch==2.13.0+cpu'
torch_index=https://download.pytorch.org/whl/cpu

say() { printf '== %s\n' "$*"; }

# find_python NEWEST: print an interpreter from 3.11 up to 3.NEWEST; $PYTHON names one.
find_python() {
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $1))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python from 3.11 to 3.$1 found; install one, or name it: PYTHON=/path/to/python make ..." >&2
    exit 1
}

# create ENVIRONMENT INTERPRETER: a virtual environment with uv, unless it is there; pip and install work in it.
create() {
    environment=$1
    if [ ! -x "$environment/bin/python" ]; then
        say "creating $environment with $("$2" --version)"
        "$2" -m venv "$environment"
    fi
    pip install "$uv"
}

pip() { "$environment/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

# install ...: what `pip install` would, by uv; by pip where only its own configuration leads to an index.
install() {
    "$environment/bin/uv" pip install --quiet --no-progress --python "$environment/bin/python" "$@" || {
        say "uv could not install this; trying pip, which has a configuration of its own"
        pip install "$@"
    }
}

# install_torch CONSTRAINTS: PyTorch's build for CPUs.
install_torch() {
    say "installing PyTorch for CPUs (about 200 MB)"
    pip install --no-compile -c "$1" "$torch" 2>/dev/null || {
        say "pip has no CPU build of torch at hand; taking it from PyTorch's own CPU wheel index"
        pip install --no-compile -c "$1" --extra-index-url "$torch_index" "$torch"
    }
}
