# shellcheck shell=sh disable=SC2154
# The virtual environment .venv at the repository root: made once, reused afterwards.
# With ONLY_PYTHON=3.12 it is .venv-3.12, of that version and no other.
#
# Sourced (POSIX sh) by the scripts beside it and by .ci/run with `root` set to the
# repository. Defines prepare_environment, install, pick_python, step and refuse.

step() { printf '==> %s\n' "$*" >&2; }

refuse() {
    printf '%s\n' "$*" >&2
    exit 2
}

# Those of pyproject.toml's requires-python, the preferred one first: 3.11 has the
# reference, TensorFlow 2.15; then the newest TensorFlow; 3.10 is the oldest.
supported_pythons="3.11 3.12 3.13 3.10"
spoken_versions="3.10 to 3.13"
if [ -n "${ONLY_PYTHON:-}" ]; then
    case " $supported_pythons " in
        *" $ONLY_PYTHON "*) supported_pythons=$ONLY_PYTHON spoken_versions=$ONLY_PYTHON ;;
        *) refuse "ONLY_PYTHON must be one of $supported_pythons. Received: $ONLY_PYTHON." \
            "Unset it to let the script choose." ;;
    esac
fi
environment_name=.venv${ONLY_PYTHON:+-$ONLY_PYTHON}
environment_python=$root/$environment_name/bin/python
_stamp=$root/$environment_name/installed.stamp

# Another project's modules must not leak in, and pip must not install beside .venv.
unset PYTHONPATH PYTHONHOME
# Each process that imports TensorFlow would compile it anew, in 10 CPU seconds.
unset PYTHONDONTWRITEBYTECODE
export PIP_USER=0

# Extras of pyproject.toml, each with all before it.
_extras="[all] [dev] [test] [test,docs,tracking]"

# prepare_environment EXTRAS: `.venv` with the project and EXTRAS, or more of them.
prepare_environment() {
    if ! _version_of "$environment_python" >/dev/null; then
        pick_python
        step "making $environment_name with Python $(_version_of "$python") ($python)"
        "$python" -m venv "$root/$environment_name" || exit 1
    elif ! _is_suitable "$environment_python" || ! _is_of_python; then
        refuse "The environment $environment_name must be of Python" \
            "$spoken_versions${PYTHON:+ and that of PYTHON=$PYTHON}. Received: Python" \
            "$(_version_of "$environment_python"). Rename or remove it and run again."
    elif grep -qxF "$(_fingerprint "$1")" "$_stamp" 2>/dev/null; then
        step "using $environment_name (Python $(_version_of "$environment_python"))"
        return
    fi
    step "installing the project and TensorFlow into $environment_name (about a minute)"
    rm -f "$_stamp" # an interrupted installation is not trusted
    # An interrupted `venv` has no pip.
    "$environment_python" -c "import pip" 2>/dev/null ||
        "$environment_python" -m ensurepip >/dev/null
    install "$environment_python" --editable "$root$1" || exit 1
    # Compiled here, not by each process of the tests at the same time.
    "$environment_python" -c "import tensorflow" 2>/dev/null || :
    for _extra in $_extras; do
        _fingerprint "$_extra"
        [ "$_extra" != "$1" ] || break
    done >"$_stamp"
}

# install PYTHON ARGUMENTS: by uv, which takes 10 CPU seconds where pip takes 40, from pip's
# index and under its constraints; by pip if uv cannot, or if pip may use no index.
install() {
    _into=$1
    shift
    _options=$("$_into" -m pip config list 2>/dev/null | sort)
    [ -z "${PIP_NO_INDEX:-}$(_option_of_pip no-index)" ] &&
        "$_into" -m pip install --disable-pip-version-check -qq uv &&
        UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(_option_of_pip index-url)}} \
        UV_CONSTRAINT=${UV_CONSTRAINT:-${PIP_CONSTRAINT:-$(_option_of_pip constraint)}} \
            "$_into" -m uv pip install --python "$_into" --system-certs -q "$@" && return
    step "pip installs, in place of uv"
    "$_into" -m pip install --disable-pip-version-check --no-compile -qq "$@"
}

# _option_of_pip NAME: its value in pip's files; that for `install` counts, if there is one.
_option_of_pip() {
    printf '%s\n' "$_options" | sed -n -e "s/^global[.]$1='\(.*\)'\$/\1/p" \
        -e "s/^install[.]$1='\(.*\)'\$/\1/p" | tail -n 1
}

# pick_python: sets `python`: $PYTHON, or the first suitable one of PATH, pyenv and uv.
pick_python() {
    python=${PYTHON:-}
    if [ -n "$python" ]; then
        _is_suitable "$python" && return
        refuse "PYTHON must name Python $spoken_versions with its venv module." \
            "Received: $python. Name another one, or unset PYTHON."
    fi
    for _version in $supported_pythons; do
        for python in "$(command -v "python$_version")" \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$_version".*/bin/python \
            "$(uv python find --no-project --system "$_version" 2>/dev/null)"; do
            _is_suitable "$python" && return
        done
    done
    python=$(command -v python3) && _is_suitable "$python" && return
    refuse "This project needs Python $spoken_versions with its venv module, and none was" \
        "found on PATH, in pyenv or in uv. Install one (Debian, Ubuntu: apt-get install" \
        "python3-venv), or name it: PYTHON=/path/to/python ${0##*/}"
}

_version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Runs the interpreter: pyenv puts shims on PATH for versions that it refuses to start.
_is_suitable() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null || return 1
    case " $supported_pythons " in *" $(_version_of "$1") "*) ;; *) return 1 ;; esac
}

_is_of_python() {
    [ "$(_version_of "${PYTHON:-$environment_python}")" = "$(_version_of "$environment_python")" ]
}

# What an installation depends on: if it changes, the project is installed again.
_fingerprint() { echo "$1 $(cat "$root/setup.py" "$root/pyproject.toml" | cksum)"; }
