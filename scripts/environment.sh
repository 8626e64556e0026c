# shellcheck shell=sh disable=SC2154
# The virtual environment .venv at the repository root: made once, reused afterwards.
# With ONLY_PYTHON=3.12 it is .venv-3.12, of that version and no other.
#
# Sourced (POSIX sh) by scripts/quickstart, scripts/test and .ci/run with `root` set to
# the repository. Defines prepare_environment, pick_python, step and refuse.

step() { printf '==> %s\n' "$*" >&2; }

refuse() {
    printf '%s\n' "$*" >&2
    exit 2
}

# The versions that pyproject.toml's requires-python allows, the preferred one first: 3.11 has
# the reference, TensorFlow 2.15; then the newest TensorFlow; 3.10 is the oldest.
supported_pythons="3.11 3.12 3.13 3.10"
_spoken_versions="3.10 to 3.13"
environment_name=.venv
if [ -n "${ONLY_PYTHON:-}" ]; then
    case " $supported_pythons " in
        *" $ONLY_PYTHON "*) ;;
        *)
            refuse "ONLY_PYTHON must be one of $supported_pythons. Received:" \
                "ONLY_PYTHON=$ONLY_PYTHON. Unset it to let the script choose."
            ;;
    esac
    supported_pythons=$ONLY_PYTHON
    _spoken_versions=$ONLY_PYTHON
    environment_name=.venv-$ONLY_PYTHON
fi
environment=$root/$environment_name
environment_python=$environment/bin/python

# Written last: an interrupted installation leaves no stamp and is not trusted.
_stamp=$environment/installed.stamp
_prompt=estimator-accum

# Another project's modules must not leak in, and pip must not install beside .venv.
unset PYTHONPATH PYTHONHOME
export PIP_USER=0

# prepare_environment EXTRAS: `.venv` with the project and EXTRAS ("[all]" or "[test]").
prepare_environment() {
    _extras=$1
    if _is_current; then
        step "using $environment_name (Python $(_version_of "$environment_python"))"
        return
    fi
    pick_python
    _lock
    _is_current || _install
    exec 9>&-
}

# pick_python: sets `python`: $PYTHON, or the first suitable one of .venv, PATH, pyenv
# and uv. Leaves with one sentence and code 2 when there is none.
pick_python() {
    _refused=
    _without_venv=
    if [ -n "${PYTHON:-}" ]; then
        _offer "$PYTHON" && return
        refuse "PYTHON must name Python $_spoken_versions with its venv module." \
            "Received: PYTHON=$PYTHON (${_refused:-it does not run})." \
            "Name another one, or unset PYTHON to let the script look for it."
    fi
    [ -x "$environment_python" ] && _offer "$environment_python" && return
    for _version in $supported_pythons; do
        _offer_from_path "python$_version" && return
    done
    _offer_from_path python3 && return
    _offer_from_path python && return
    for _version in $supported_pythons; do
        _offer_from_pyenv "$_version" && return
    done
    for _version in $supported_pythons; do
        _offer_from_uv "$_version" && return
    done
    if [ -n "$_without_venv" ]; then
        refuse "Python needs its venv module to make $environment_name." \
            "Received: $_without_venv without it." \
            "Install it (Debian, Ubuntu: apt-get install python3-venv) and run again."
    fi
    refuse "This project needs Python $_spoken_versions, and none was found on PATH," \
        "in pyenv or in uv (found: ${_refused:-no Python at all})." \
        "Install one, or name it: PYTHON=/path/to/python ${0##*/}"
}

# Runs the interpreter: pyenv puts shims on PATH for versions that it refuses to start.
_version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Identifies an installed interpreter, equal inside and outside of its environments.
_identity_of() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null
}

_is_supported() {
    case " $supported_pythons " in
        *" $1 "*) return 0 ;;
        *) return 1 ;;
    esac
}

# Sets `python` if this interpreter is suitable, else remembers the reason.
_offer() {
    _found=$(_version_of "$1") || return 1
    if ! _is_supported "$_found"; then
        _refused="$_refused${_refused:+, }Python $_found at $1"
        return 1
    fi
    if ! "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        _without_venv=$1
        _refused="$_refused${_refused:+, }Python $_found at $1 without its venv module"
        return 1
    fi
    python=$1
}

# Every folder of PATH, not only the first hit: a shim may hide a working one.
_offer_from_path() {
    _name=$1
    _ifs=$IFS
    IFS=:
    set -f
    # shellcheck disable=SC2086 # split at the colons
    set -- $PATH
    set +f
    IFS=$_ifs
    for _folder; do
        [ -x "$_folder/$_name" ] && _offer "$_folder/$_name" && return
    done
    return 1
}

_offer_from_pyenv() {
    for _candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python; do
        [ -x "$_candidate" ] && _offer "$_candidate" && return
    done
    return 1
}

_offer_from_uv() {
    command -v uv >/dev/null || return 1
    _candidate=$(uv python find --no-project --system "$1" 2>/dev/null) || return 1
    _offer "$_candidate"
}

# The facts that an installation depends on: if one changes, the project is reinstalled.
_fingerprint() {
    {
        printf '%s\n' "$root"
        cat "$root/setup.py" "$root/pyproject.toml"
        (cd "$root" && LC_ALL=C ls -d -- */__init__.py)
        _identity_of "$environment_python"
    } | cksum
}

# The stamp's content after an installation with these extras.
_stamp_line() { printf '%s%s\n' "$(_fingerprint)" "$1"; }

_is_current() {
    [ -f "$_stamp" ] && _is_supported "$(_version_of "$environment_python")" &&
        _is_wanted_python "$environment_python" &&
        grep -qxF "$(_stamp_line "$_extras")" "$_stamp"
}

# Any interpreter will do, unless PYTHON names another one.
_is_wanted_python() {
    [ -z "${PYTHON:-}" ] || [ "$(_identity_of "$1")" = "$(_identity_of "$PYTHON")" ]
}

# Of two concurrent runs the second waits. The lock ends with the process that holds it.
_lock() {
    exec 9>>"$root/$environment_name.lock"
    _flock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]))'
    _non_blocking=4 # fcntl.LOCK_NB
    if ! "$python" -c "$_flock" "$_non_blocking" 2>/dev/null; then
        step "another run is preparing $environment_name: waiting for it"
        "$python" -c "$_flock" 0
    fi
}

_install() {
    _refuse_foreign_environment
    if _is_reusable; then
        rm -f "$_stamp"
    else
        _make_environment
    fi
    step "installing the project and TensorFlow into $environment_name (about a minute)"
    set -- -m pip install --disable-pip-version-check --no-compile --editable "$root$_extras"
    if ! "$environment_python" "$@" -qq; then
        printf '%s\n' "pip could not install the project: its message is above." \
            "To see all of it: $environment_python $*" >&2
        exit 1
    fi
    # The test requirements include those of a run.
    { _stamp_line "[all]" && _stamp_line "$_extras"; } >"$_stamp"
}

# A finished environment of this project, or a user's own; never an unfinished one.
_is_reusable() {
    _is_supported "$(_version_of "$environment_python")" &&
        _is_wanted_python "$environment_python" &&
        { [ -f "$_stamp" ] || ! _is_ours; }
}

# A user's own .venv is used if it is suitable, and is never deleted.
_refuse_foreign_environment() {
    _found=$(_version_of "$environment_python") || return 0
    if _is_ours || _is_reusable; then
        return
    fi
    refuse "The environment $environment_name must be made by this script, or be" \
        "Python $_spoken_versions${PYTHON:+ and that of PYTHON=$PYTHON}." \
        "Received: one of Python $_found that somebody else made." \
        "Rename or remove $environment and run again."
}

_is_ours() {
    grep -q "^prompt = .*$_prompt" "$environment/pyvenv.cfg" 2>/dev/null
}

_make_environment() {
    # The base interpreter: `python` may be the one inside .venv, which is deleted.
    _interpreter=$(
        "$python" -c 'import os, sys; print(os.path.realpath(sys.executable))'
    )
    step "making $environment_name with Python $(_version_of "$python") ($_interpreter)"
    if ! "$_interpreter" -m venv --clear --prompt "$_prompt" "$environment"; then
        printf '%s\n' "The environment $environment_name could not be made: see above." >&2
        exit 1
    fi
}
