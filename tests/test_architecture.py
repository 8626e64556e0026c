"""What docs/architecture.md says about imports, and about who reads the environment."""

import ast
import functools
import pathlib
import re

import pytest

pytestmark = pytest.mark.once

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_LIBRARY = _REPOSITORY / "estimator_accum"
_PROGRAMS = ("bert_finetune", "housing_example", "distributed")
# The core from below; what stands in one row may import from its row and from below.
_ROWS = [
    ("_graph",),
    ("_gradients", "_writers", "_global_step"),
    ("_options", "_change", "_noise_scale"),
    ("_applying", "_finished"),
    ("_window",),
    ("_recompute", "_seed", "_precision"),
]
_CORE = {name: row for row, names in enumerate(_ROWS) for name in names}
_PACKAGES = {
    "reports": {"reports"},
    "hooks": {"hooks", "reports"},
    "microbatch": {"microbatch", "hooks"},
    "unedited": {"microbatch", "unedited"},
    "keras": {"keras"},
    "compat": {"compat"},
    "programs": {"programs", "compat", "reports", "_applying", "microbatch", ""},
}
# The commands of `unedited` know what a program knows; "" is all public names.
_OF_COMMANDS = {"compat", "programs", ""}
_COMMANDS = ("run", "check", "_command", "_comparison", "_estimators")
_COMMANDS += ("_session_loops", "_loop_comparison")
# The interfaces, which stand on `microbatch` and `unedited`.
_ABOVE = {
    "_model_fn": {"microbatch", "unedited"},
    "_declared": {"microbatch", "unedited"},
    "_train_op": {"_declared"},
    "_optimizer": {"_declared", "_train_op"},
}
# The public names, and the command.
_ENTRANCES = [_LIBRARY / name for name in ("__init__.py", "__main__.py")]
_MODULES = sorted(_LIBRARY.rglob("*.py"))


def _imported(path) -> set[str]:
    """Returns the modules of this repository that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    rooms = ("estimator_accum", "scripts", "tests", *_PROGRAMS)
    return {name for name in found if name.split(".")[0] in rooms}


def _first_part(module: str) -> str:
    """Returns "hooks" for estimator_accum.hooks._signals, "" for the public names."""
    return (module.split(".") + [""])[1]


@pytest.mark.parametrize(
    "path", _MODULES, ids=lambda path: str(path.relative_to(_LIBRARY))
)
def test_a_module_of_the_library_imports_from_its_own_row_or_from_below(path):
    if path in _ENTRANCES:
        return
    modules = _imported(path)
    assert {name.split(".")[0] for name in modules} <= {"estimator_accum"}
    parts = {_first_part(name) for name in modules}
    own = path.relative_to(_LIBRARY).parts[0].removesuffix(".py")
    if own in _CORE:
        assert parts <= _CORE.keys()
        assert all(_CORE[part] <= _CORE[own] for part in parts)
    elif own in _ABOVE:
        assert parts <= _ABOVE[own] | _CORE.keys()
    elif own in ("compat", "reports", "programs"):
        assert parts <= _PACKAGES[own]
    elif own == "unedited" and path.stem in _COMMANDS:
        assert parts <= _PACKAGES[own] | _OF_COMMANDS | _CORE.keys()
    else:
        assert parts <= _PACKAGES[own] | _CORE.keys()


def test_every_module_of_the_core_has_a_row():
    files = {path.stem for path in _LIBRARY.glob("_*.py")} - {"__init__", "__main__"}
    assert files == _CORE.keys() | _ABOVE.keys()
    packages = {path.parent.name for path in _LIBRARY.glob("*/__init__.py")}
    assert packages == _PACKAGES.keys()


def test_the_library_stands_on_nine_floors():
    names = {
        ".".join(path.relative_to(_REPOSITORY).with_suffix("").parts): path
        for path in _MODULES
        if path not in _ENTRANCES
    }
    below = {name: _imported(path) & names.keys() for name, path in names.items()}

    @functools.cache
    def floor(name: str) -> int:  # modules that import one another have none
        return 1 + max(map(floor, below[name]), default=0)

    assert max(map(floor, names)) <= 9


@pytest.mark.parametrize("room", _PROGRAMS)
def test_a_program_imports_no_other_one(room):
    for path in (_REPOSITORY / room).glob("*.py"):
        rooms = {name.split(".")[0] for name in _imported(path)}
        assert rooms <= {room, "estimator_accum"}, path


def test_a_program_imports_no_private_name_of_the_library():
    experiments = _REPOSITORY / "scripts" / "experiments" / "public"
    for room in (*(_REPOSITORY / name for name in _PROGRAMS), experiments):
        for path in room.glob("*.py"):
            assert not _private_names(path.read_text()), path
    code = "from estimator_accum.a import b, _c\nimport estimator_accum._d.e, _f"
    assert _private_names(code) == ["estimator_accum.a._c", "estimator_accum._d.e"]


def _private_names(code: str) -> list[str]:
    """Returns what is imported from the library and has a name that begins with `_`."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if re.match(r"estimator_accum\..*\b_", f"{name}")]


def test_the_core_reads_no_flag_and_no_environment_and_prints_nothing():
    outside = {_LIBRARY / name for name in ("programs", "compat")}
    commands = {_LIBRARY / "unedited" / f"{name}.py" for name in _COMMANDS}
    words = re.compile(r"os\.environ|getenv|\babsl\b|argparse|\bprint\(|[\"'`]--\w")
    for path in _MODULES:
        is_entrance = path in _ENTRANCES or path in commands
        if not is_entrance and not outside & set(path.parents):
            assert not words.search(path.read_text()), path
