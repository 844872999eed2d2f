# Sourced by the scripts that create virtual environments, from the project's root: what they have in common.
# pip fetches PyTorch, from where its own configuration says, and uv; uv installs everything, in a third of the time,
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

# install_own ...: as install, for projects of this tree: a build writes into it, so one at a time.
install_own() { exclusively install "$@"; }

# exclusively COMMAND ...: run it while no other set-up script runs such a command; they may run beside each other.
exclusively() {
    mkdir -p build
    (
        ! command -v flock >/dev/null || flock 9
        "$@"
    ) 9>build/setup.lock
}

# install_torch CONSTRAINTS: PyTorch's build for CPUs, whose wheel is fetched once for all environments.
install_torch() {
    exclusively fetch_torch
    install -c "$1" "$(torch_wheel)"
}

torch_wheel() {
    local python
    python=$("$environment/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    find build/wheels -name "torch-${torch#torch==}-$python-*.whl" 2>/dev/null | head -n 1
}

fetch_torch() {
    [ -z "$(torch_wheel)" ] || return 0
    say "fetching PyTorch for CPUs (about 200 MB)"
    mkdir -p build/wheels
    pip download --no-deps --dest build/wheels "$torch" 2>/dev/null || {
        say "pip has no CPU build of torch at hand; taking it from PyTorch's own CPU wheel index"
        pip download --no-deps --dest build/wheels --extra-index-url "$torch_index" "$torch"
    }
}

# mend_torchvision: the index's build describes operators to torch that it has for GPUs only, which ends its import.
# Image transforms need none of them, so the description goes; the file may be a link to uv's store.
mend_torchvision() {
    "$environment/bin/python" -c 'import torchvision' 2>/dev/null && return
    local described
    described=$("$environment/bin/python" -c 'from importlib.util import find_spec
print(find_spec("torchvision").submodule_search_locations[0] + "/_meta_registrations.py")')
    rm "$described"
    : > "$described"
    "$environment/bin/python" -c 'import torchvision'
}
