"""The rules of docs/architecture.md for imports, files, names."""

import ast
import functools
import graphlib
import pathlib
import re
from collections.abc import Collection

import pytest

from scripts.changed_tests import imported_modules

pytestmark = pytest.mark.once

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_LIBRARY = _REPOSITORY / "estimator_accum"
_PROGRAMS = ("bert_finetune", "housing_example", "distributed")
# The rooms from below, and what each may import from beside itself; "" is the public
# names.
_ROOMS = {
    "graph": set(),
    "reports": set(),
    "compat": set(),
    "precision": {"graph"},
    "rows": {"graph"},
    "checks": {"graph", "rows"},
    "core": {"graph", "rows", "checks"},
    "seed": {"graph", "checks", "core"},
    "recomputing": {"graph", "core"},
    "hooks": {"graph", "checks", "core", "reports"},
    "microbatch": {"graph", "rows", "core", "hooks", "reports", "seed", "precision"},
    "keras": {"checks", "graph", "rows", "core", "microbatch"},
    "programs": {"", "compat", "core", "microbatch", "reports"},
    "unedited": {"", "checks", "compat", "core", "graph", "microbatch", "programs"},
}
# Names of TensorFlow that are not public, and those of Keras.
_INTERNALS = [_LIBRARY / name for name in ("graph/internals.py", "keras/_internals.py")]
# Objects of the library that a module reads private attributes of, besides `self`.
_OWN_OBJECTS = {
    "rows/analysis.py": {"body"},
    "keras/_accumulate.py": {"adapter"},
    "keras/_window.py": {"variables"},
}
# Names that are not public and that few modules use, which are in no such file.
_OF_TRAINING = "tensorflow.python.training"
_NEIGHBOURS = {
    "compat/_modules.py": {
        *("tensorflow.python.distribute.estimator_training", "tensorflow.python.tpu."),
        *("tensorflow.python.ops.gen_training_ops", f"{_OF_TRAINING}.training_ops"),
        *("tensorflow.python.estimator", "tensorflow_estimator.python.estimator"),
    },
    "compat/_training.py": {
        *("_cluster_spec", "_config", "_distribute_coordinator_mode"),
        *("_experimental_distribute", "_init_distributed_setting_from_environment_var"),
        "_maybe_overwrite_session_config_for_distributed_training",
        *("_start_continuous_evaluation", "_train_distribute"),
        "tensorflow.python.distribute.distribute_coordinator",
        "tensorflow.python.distribute.distribute_coordinator_context",
    },
    "compat/v1/_arg_scope.py": {"_key_op"},
    "compat/v1/_contrib.py": {
        "_binary_logistic_head_with_sigmoid_cross_entropy_loss",
        "_multi_class_head_with_softmax_cross_entropy_loss",
        *("_regression_head", "tensorflow.python.ops", "tensorflow.python.tpu"),
        "tensorflow_estimator.python.estimator",
        "tensorflow_estimator.python.estimator.canned",
    },
    "compat/v1/_global_step.py": {_OF_TRAINING},
    "compat/v1/_imports.py": {"tensorflow.python"},
    "compat/v1/_normalization.py": {_OF_TRAINING},
    "compat/v1/_removed.py": {"tensorflow.python.ops"},
    "programs/command_line.py": {"_option_string_actions"},  # of argparse
    "programs/saving.py": {"_save", "_set_steps_per_run", "_timer"},
    "bert_finetune/optimization.py": {"_get_or_make_slot_with_initializer"},
    "bert_finetune/optimizers.py": {"_get_or_make_slot_with_initializer"},
}
# The public names, and the command.
_ENTRANCES = [_LIBRARY / name for name in ("__init__.py", "__main__.py")]
_MODULES = sorted(_LIBRARY.rglob("*.py"))
# The files that a user or a reader opens: all but the tests.
_CODE = sorted(
    path
    for room in ("estimator_accum", *_PROGRAMS, "examples", "scripts")
    for path in (_REPOSITORY / room).rglob("*.py")
)
_TESTS = sorted((_REPOSITORY / "tests").rglob("*.py"))
_OF_LIBRARY = pytest.mark.parametrize(
    "path", _MODULES, ids=lambda path: str(path.relative_to(_LIBRARY))
)


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _imported(path: pathlib.Path) -> set[str]:
    """Returns the modules of this repository that a file imports, wherever it does."""
    modules = {name for name, _ in imported_modules(_tree(path))}
    rooms = ("estimator_accum", "scripts", "tests", *_PROGRAMS)
    return {name for name in modules if name.split(".")[0] in rooms}


def _room_of(module: str) -> str:
    """Returns "hooks" for estimator_accum.hooks._signals, "" for the public names."""
    return (module.split(".") + [""])[1]


@_OF_LIBRARY
def test_a_module_of_the_library_imports_from_its_room_and_from_those_below(path):
    if path in _ENTRANCES:
        return
    modules = _imported(path)
    assert {name.split(".")[0] for name in modules} <= {"estimator_accum"}
    room = path.relative_to(_LIBRARY).parts[0].removesuffix(".py")
    assert {_room_of(name) for name in modules} <= _ROOMS[room] | {room}


def test_no_room_is_above_itself():
    rooms = {""}
    for room, below in _ROOMS.items():
        assert below <= rooms, room
        rooms.add(room)
    files = {path.relative_to(_LIBRARY).parts[0] for path in _MODULES}
    assert {name.removesuffix(".py") for name in files} == {
        *(_ROOMS),
        *("__init__", "__main__"),
    }


def test_no_module_imports_itself_through_others():
    paths = {
        ".".join(path.relative_to(_REPOSITORY).with_suffix("").parts): path
        for path in _MODULES
        if path not in _ENTRANCES
    }
    below = {name: _imported(path) & paths.keys() for name, path in paths.items()}
    assert list(graphlib.TopologicalSorter(below).static_order())


def test_one_sentence_without_and_describes_a_module():
    for path in [*_CODE, *_TESTS]:
        text = ast.get_docstring(_tree(path)) or ""
        if text or path.name != "__init__.py":
            sentence = text.split("\n\n")[0]
            assert sentence.endswith("."), path
            assert not re.search(r"\n|\b(and|[Ww]hat)\b", sentence), path


def test_the_first_line_of_a_docstring_has_no_clause_with_what():
    kinds = ast.FunctionDef | ast.ClassDef
    for path in [*_CODE, *_TESTS]:
        for node in ast.walk(_tree(path)):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                line = text.split("\n\n")[0]
                assert not re.search(r"\b[Ww]hat\b", line), f"{path}: {line}"


def test_variables_are_named_by_nouns():
    vague = {"each", "found", "own", "known", "made", "given"}
    for path in [*_CODE, *_TESTS]:
        nodes = list(ast.walk(_tree(path)))
        stored = (n for n in nodes if isinstance(n, ast.Name | ast.arg))
        names = {
            node.id if isinstance(node, ast.Name) else node.arg
            for node in stored
            if isinstance(getattr(node, "ctx", ast.Store()), ast.Store)
        }
        assert not names & vague, f"{path.relative_to(_REPOSITORY)}: {names & vague}"


def test_texts_are_read_and_written_in_a_named_encoding():
    """By default it is the machine's."""
    unnamed = [
        f"{path.name}:{node.lineno}"
        for room in ("estimator_accum", *_PROGRAMS)
        for path in (_REPOSITORY / room).rglob("*.py")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("read_text", "write_text")
        and "encoding" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not unnamed


def test_no_table_of_operations_is_there_twice():
    places = {}
    for path in _MODULES:
        for node in _tree(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Set):
                parts = ast.walk(node.value)
                leaves = [n for n in parts if isinstance(n, ast.Constant | ast.Name)]
                types = frozenset(map(ast.unparse, leaves))
                places.setdefault(types, []).append(path)
    assert [paths for paths in places.values() if len(paths) > 1] == []


@pytest.mark.parametrize("room", _PROGRAMS)
def test_a_program_imports_no_other_one(room):
    for path in (_REPOSITORY / room).glob("*.py"):
        rooms = {name.split(".")[0] for name in _imported(path)}
        assert rooms <= {room, "estimator_accum"}, path


def test_a_program_imports_public_modules_of_the_library():
    experiments = _REPOSITORY / "scripts" / "experiments" / "public"
    for room in (*(_REPOSITORY / name for name in _PROGRAMS), experiments):
        for path in room.glob("*.py"):
            assert not _private_names(path.read_text()), path
    code = "from estimator_accum.hooks import b, _c\nimport estimator_accum.core.d, _f"
    assert _private_names(code) == [
        "estimator_accum.hooks._c",
        "estimator_accum.core.d",
    ]


def _private_names(code: str) -> list[str]:
    """Returns imports from the library's private rooms, and of names with `_`."""
    imported = [
        f"{module}.{name}" if name else module
        for module, names in imported_modules(ast.parse(code))
        for name in names or [""]
    ]
    private = r"estimator_accum\.(.*\b_|(core|graph|rows|checks|microbatch|unedited)\.)"
    return [name for name in imported if re.match(private, name)]


def test_the_index_of_tables_names_their_readers():
    page = (_REPOSITORY / "docs" / "development.md").read_text()
    row = r"^\| `(\w+)` \| .* \| (`test_\w+`(?:, `test_\w+`)*) \|$"
    index = dict(re.findall(row, page, re.MULTILINE))
    assert len(index) == 6
    readers = {name: set() for name in index}
    for path in _REPOSITORY.glob("tests/estimator_accum/unedited/test_*.py"):
        for module, names in imported_modules(_tree(path)):
            for name in readers.keys() & {module.split(".")[-1], *(names or ())}:
                readers[name].add(path.stem)
    for name, tests in index.items():
        assert set(re.findall(r"\w+", tests)) == readers[name], name


def test_the_core_reads_no_flag_and_no_environment_and_prints_nothing():
    outside = {_LIBRARY / name for name in ("programs", "compat", "unedited")}
    words = re.compile(r"os\.environ|getenv|\babsl\b|argparse|\bprint\(|[\"'`]--\w")
    for path in _MODULES:
        text = path.read_text()
        if path in _INTERNALS:  # a switch of TensorFlow's own is set there
            text = text.replace("os.environ", "")
        if path not in _ENTRANCES and not outside & set(path.parents):
            assert not words.search(text), path


@pytest.mark.parametrize("room", [*_ROOMS, *_PROGRAMS])
def test_what_is_not_public_is_reached_through_one_file(room):
    top = _REPOSITORY if room in _PROGRAMS else _LIBRARY
    paths = [*(top / room).rglob("*.py"), *top.glob(f"{room}.py")]
    # A class may have attributes from a base in another file of its room.
    defined = set().union(*(_defined(_tree(path)) for path in paths))
    for path in {*paths} - {*_INTERNALS}:
        name = str(path.relative_to(top))
        private = _internals(path.read_text(), _OWN_OBJECTS.get(name, set()), defined)
        assert private == _NEIGHBOURS.get(name, set()), name


def test_internals_are_found_in_code():
    code = """
from tensorflow.python.ops import nn_ops
from tensorflow import _api
import tensorflow.python.client
importlib.import_module("tensorflow.python.eager")
class Saver(tf.compat.v1.train.Saver):
    _known = 1
    def __init__(self, spec, body):
        super()._build()
        self._session, self._own = spec._replace(loss=0)._session, 1
        self._own = self._var_list[self._known]
        self._own._update_input(hasattr(spec, "_initializer_op"), getattr(self, "_own"))
        isinstance(body._own, tf.__internal__.CompositeTensor)
"""
    assert _internals(code, {"body"}) == {
        *("tensorflow.python.ops", "_api", "tensorflow.python.client"),
        *("tensorflow.python.eager", "_build", "_session", "_var_list"),
        *("_update_input", "_initializer_op", "__internal__"),
    }
    assert "_var_list" not in _internals(code, {"body"}, {"_var_list"})


def _defined(tree: ast.AST) -> set[str]:
    """Returns the names that code gives to functions, classes, variables, attributes."""
    names = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            names.add(getattr(node, "id", getattr(node, "attr", None)))
        elif isinstance(node, ast.Call):  # such as vars(self).update(_name=value)
            names |= {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func) == "object.__setattr__":
                names.add(getattr(node.args[1], "value", None))
        elif isinstance(node, ast.Dict):  # contents of a class
            names |= {k.value for k in node.keys if isinstance(k, ast.Constant)}
    return names


def _internals(code: str, ours: set[str], inherited: Collection[str] = ()) -> set[str]:
    """Returns the private names that code reaches of others, and modules that have them.

    Args:
        code: A module.
        own: Names of variables whose private attributes are the library's.
        inherited: Private attributes of `self` that other modules define.
    """
    private, tree = set(), ast.parse(code)
    defined = _defined(tree) | {*inherited}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            is_own = node.module.startswith("estimator_accum")
            names = () if is_own else [alias.name for alias in node.names]
            private |= {node.module, *names}
        elif isinstance(node, ast.Import):
            private |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            private |= (
                {node.value} if node.value.startswith(_MODULES_OF_OTHERS) else set()
            )
        elif (attribute := _attribute(node)) is not None:
            owner, name = attribute
            is_self = owner in ("self", "cls", "super()")
            if not (is_self and name in defined or owner in ours):
                private.add(name)
    return {
        name
        for name in private - {"_replace", "_asdict", "_exit"}  # which are documented
        if name.startswith(_MODULES_OF_OTHERS)
        or name in ("__internal__", "outer_graph", "captures")
        or re.match("_(?!_|estimator_accum)", name)
    }


def _attribute(node: ast.AST) -> tuple[str, str] | None:
    """Returns an attribute's owner and name, also of getattr(owner, "name")."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _OF_ATTRIBUTES:
        match node.args:
            case [owner, ast.Constant(value=name), *_]:
                return ast.unparse(owner), name
    return None


_MODULES_OF_OTHERS = ("tensorflow.python", "tensorflow_estimator")
_OF_ATTRIBUTES = {"getattr", "hasattr", "setattr", "delattr"}
