"""Mutants, the tests chosen for them, and the files of killed ones and survivors."""

import ast
import contextlib
import json
import pathlib
from collections import Counter

import coverage
import pytest

from scripts.mutation import mutants
from scripts.mutation.coverage_map import CoverageMap, build
from scripts.mutation.mutate import places, places_of, sample
from tests.helpers import running

_REPOSITORY = running.ROOT
_WITH = "after = tf.control_dependencies\nwith after([{}]): pass"
_TWO_LINES = "def f():\n    '''Text.'''\n    a()\n    "


def _mutated(source: str, kind: str) -> list[str]:
    source = source.encode()
    found = [each for each in places_of("a.py", source) if each.mutant.kind == kind]
    return [place.applied_to(source).decode() for place in found]


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("comparison", "a < b  is not c", ["a <= b  is not c", "a < b  is c"]),
        ("comparison", "(a) not in (b)", ["(a) in (b)"]),
        ("boolean", "(a or b) and c", ["(a or b) or c", "(a and b) and c"]),
        ("not", "x = not (a)", ["x = (a)"]),
        ("number", "f(3, k=0.5)", ["f(4, k=0.5)", "f(3, k=1.0)"]),
        ("truth", "f(True)", ["f(False)"]),
        ("arithmetic", "a // (b) - é", ["a * (b) - é", "a // (b) + é"]),
        ("arithmetic", "a += 1", ["a -= 1"]),
        ("arithmetic", "a + 'text' + [b]", []),
        ("control_dependencies", _WITH.format("a, b"), [_WITH.format("")]),
        ("control_dependencies", "tf.control_dependencies(None)", []),
        ("arguments", "f(a,  b[0], c)", ["f(b[0],  a, c)"]),
        ("arguments", "max(a, b), f(a, a), f(*a, b)", []),
        ("keyword", "f(a, b=(1), **c)", ["f(a, **c)"]),
        ("keyword", "f(a, b=1)", ["f(a, )"]),
        ("keyword", "f(name='a')", []),
        ("statement", "if a:\n    b.clear()\nc", ["if a:\n    pass\nc"]),
        ("element", "f((a, b))", ["f((b,))", "f((a,))"]),
        ("element", "f([a, b, c])", ["f([b, c])", "f([a, c])", "f([a, b])"]),
        ("condition", "a if b else c", ["a if True else c", "a if False else c"]),
        ("return", "def f():\n    return 1", ["def f():\n    return None"]),
        ("raise", "if a:\n    raise E(a < b)", ["if a:\n    pass"]),
        ("early_return", f"{_TWO_LINES}b()", [f"{_TWO_LINES}return\n    b()"]),
        ("early_return", "def f():\n    '''Text.'''\n    a()", []),
    ],
)
def test_each_kind_changes_what_it_names_and_nothing_else(kind, source, expected):
    assert sorted(_mutated(source, kind)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text of 1 < 2."""',
        'f"{a + 1}"',
        "import a, b",
        "_logger.info('%s', a + 1)",
        "tf.compat.v1.logging.warning(a < b)",
        "x = ValueError(a + 1)",
        "parser.add_argument('--a', default=1)",
        "flags.DEFINE_bool('a', True, 'b')",
        "if __name__ == '__main__':\n    main(1)",
        "if TYPE_CHECKING:\n    f(1)",
        "__all__ = f(1)",
        "@cache(1)\ndef f(a: 1) -> 2: pass",
    ],
)
def test_text_imports_logs_errors_and_flags_are_left_alone(source):
    assert not places_of("a.py", source.encode())


def test_every_mutant_of_a_file_is_another_program():
    source = (_REPOSITORY / "estimator_accum" / "_micro_step.py").read_bytes()
    mutated = [place.applied_to(source) for place in places_of("", source)]
    programs = [ast.dump(ast.parse(each)) for each in mutated]
    assert len(programs) > 50
    assert ast.dump(ast.parse(source)) not in programs


def test_mutant_is_found_again_after_edits_elsewhere_in_the_file():
    source = b"def f(a):\n    return a + 1 + (a + 1)\n"
    before = {place.mutant for place in places_of("a.py", source)}
    edited = b"# New.\ndef g(b):\n    return b + 1\n" + source.replace(b"    ", b"  ")
    after = {place.mutant: place for place in places_of("a.py", edited)}
    assert before < after.keys()
    twice = [m for m in before if m.original == "a + 1" and m.kind == "number"]
    assert sorted(mutant.occurrence for mutant in twice) == [1, 2]


def test_sample_has_every_file_and_no_kind_prevails():
    candidates = list(places(_REPOSITORY, "estimator_accum").values())
    drawn = sample(candidates, 170, seed=1)
    assert drawn == sample(candidates, 170, seed=1) != sample(candidates, 170, seed=2)
    assert len(set(drawn)) == len(drawn) >= 170
    paths = {place.mutant.path for place in candidates}
    assert {place.mutant.path for place in drawn} == paths
    kinds = Counter(place.mutant.kind for place in drawn)
    assert max(kinds.values()) < 0.15 * len(drawn)
    for kind in ("control_dependencies", "statement", "comparison"):
        assert kinds[kind] > 0.09 * len(drawn)


_CODE = b"""\
LIMIT = 1

def check(a):
    if a > 2:
        return a + 3

def unused(a):
    a += 4
"""
_SECS = {
    "tests/test_a.py::test_one[0]": 1,
    "tests/test_a.py::test_one[1]": 2,
    "tests/test_b.py::test_two": 3,
    "tests/test_limits.py::test_three": 5,
    "tests/test_limits.py::test_red": 1,
}


@pytest.fixture
def known(tmp_path) -> CoverageMap:
    """A recorded map: a fixture of test_limits.py runs line 5."""
    cases = ""
    for test, secs in _SECS.items():
        path, _, name = test.partition("::")
        names = path.removesuffix(".py").replace("/", "."), name
        inside = "<failure/>" if name == "test_red" else ""
        cases += '<testcase classname="{}" name="{}" '.format(*names)
        cases += f'time="{secs}">{inside}</testcase>'
    (tmp_path / "junit.xml").write_text(f"<testsuites>{cases}</testsuites>")
    data = coverage.CoverageData(str(tmp_path / "data.1"))
    for context, lines in {
        "import": [1, 3, 7],
        "import|tests/test_a.py::test_one[0]": [4, 5],
        "import|tests/test_a.py::test_one[1]": [4],
        "tests/test_b.py::test_two": [1, 3, 4],  # another process
        "tests/test_limits.py": [5],
        "tests/test_limits.py::test_red": [4],
    }.items():
        data.set_context(context)
        data.add_lines({str(tmp_path / "room/limits.py"): lines})
    data.close()
    build(tmp_path, tmp_path)
    return CoverageMap(tmp_path)


def _place(original: str):
    found = places_of("room/limits.py", _CODE)
    return next(place for place in found if place.mutant.original == original)


@pytest.mark.parametrize(
    ("original", "tests"),
    [
        ("a > 2", ["test_one[0]", "test_one[1]", "test_two"]),
        ("a + 3", ["test_one[0]", "test_three"]),
        ("1", ["test_one[0]", "test_one[1]", "test_two", "test_three"]),  # at import
        ("a += 4", []),
    ],
)
def test_map_knows_the_tests_that_run_a_line(known, original, tests):
    names = [test.partition("::")[2] for test in known.tests(_place(original))]
    assert names == tests


@pytest.mark.parametrize(
    ("budget_secs", "tests"),
    [
        (99, ["test_three", "test_one[0]", "test_one[1]", "test_two"]),
        (9, ["test_three", "test_one[0]", "test_two"]),
        (0, ["test_three"]),
    ],
)
def test_file_of_the_name_comes_first_then_the_cheapest(known, budget_secs, tests):
    names = [t.partition("::")[2] for t in known.chosen(_place("1"), budget_secs)]
    assert names == tests


_TESTS = """\
import subprocess, time

def test_green(): pass
def test_red(): assert False
def test_end(): import os; os._exit(3)
def test_hang():
    command = ["sh", "-c", "echo $$ > pid; exec sleep 600"]
    subprocess.Popen(command, start_new_session=True)
    time.sleep(600)
"""
_FORK = "from scripts.mutation import fork; fork._SLOW_IMPORTS = (); fork.main()"


@pytest.mark.once
def test_forked_run_keeps_the_order_and_leaves_no_process(tmp_path):
    (tmp_path / "test_a.py").write_text(_TESTS)

    def test(name):
        return f"test_a.py::test_{name}"

    green = [test("green")]
    asked_and_expected = [
        ([["green", "red", "end"], 60, True], (green, test("red"), "call fails")),
        ([["red", "green"], 60, False], (green, test("red"), "call fails")),
        ([["gone", "green"], 60, False], (green, test("gone"), "not collected")),
        ([["end"], 60, True], ([], test("end"), "exit code 3")),
        ([["green", "hang"], 3, True], (green, test("hang"), "timeout")),
    ]
    requests = [[[*map(test, a)], *rest] for (a, *rest), _ in asked_and_expected]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)))
    with path.open() as stdin:
        arguments, options = ["-c", _FORK, tmp_path], {"cwd": tmp_path, "stdin": stdin}
        done = running.run(*arguments, **options, PYTHONPATH=str(_REPOSITORY))
    answers = [tuple(json.loads(line).values()) for line in done.stdout.splitlines()]
    assert answers == [expected for _, expected in asked_and_expected], done.stderr
    pid = (tmp_path / "pid").read_text().strip()
    assert not pathlib.Path("/proc", pid).exists()


class _Workers(contextlib.nullcontext):
    """Fake of `run.Workers`: `weak` never fails, `red` never passes."""

    def __init__(self, *_):
        super().__init__(self)

    def passing(self, tests):
        return {test: 1.0 for test in tests if "red" not in test}

    def answers(self, runs):
        for key, ([test], _, _) in runs.items():
            yield key, {"failed": None if "weak" in test else test}


@pytest.mark.parametrize(
    ("test", "code", "line"),
    [
        ("strong", 0, "1 of 1 mutants killed"),
        ("weak", 1, "survives weak: estimator_accum/a.py f arithmetic 1: a + 1 -> a -"),
        ("red", 1, "does not pass without a mutant: red"),
    ],
)
def test_check_names_each_survivor(tmp_path, monkeypatch, capsys, test, code, line):
    monkeypatch.setattr(mutants, "workers", _Workers)
    (tmp_path / "estimator_accum").mkdir()
    source = tmp_path / "estimator_accum" / "a.py"
    source.write_text("def f(a):\n    return a + 1\n")
    mutants_of_a = places(tmp_path, "estimator_accum")
    [mutant] = (each for each in mutants_of_a if each.kind == "arithmetic")
    floor = tmp_path / "floor.jsonl"
    rows = [mutant, mutant._replace(original="a + 2")]
    floor.write_text("\n".join(mutants._line(row, {"test": test}) for row in rows))
    flags = ["--check", f"--root={tmp_path}", f"--floor={floor}"]
    assert mutants.main(flags) == code
    output = capsys.readouterr().out
    assert line in output
    assert "gone: estimator_accum/a.py f arithmetic 1: a + 2 -> a - 1" in output


def test_files_that_do_not_fit_are_refused(tmp_path, capsys):
    floor = tmp_path / "floor.jsonl"
    assert mutants.main(["--check", f"--floor={floor}"]) == 2
    floor.write_text('{"path": "a.py"}\n')
    assert mutants.main(["--check", f"--floor={floor}"]) == 2
    assert "line 1 must be a JSON object with path, function" in capsys.readouterr().err


def test_kept_files_move_a_mutant_and_keep_its_reason(tmp_path):
    source = b"f(a + 1)\n"
    killed, equivalent, new = [p.mutant for p in places_of("a.py", source)][:3]
    paths = [tmp_path / name for name in ("floor.jsonl", "survivors.jsonl")]
    flags = [f"--floor={paths[0]}", f"--survivors={paths[1]}"]
    flags = mutants._parser().parse_args(flags)
    paths[0].write_text(mutants._line(new, {"test": "tests/old.py::test"}))
    reason = {"reason": "equivalent: a is 0"}
    paths[1].write_text(mutants._line(equivalent, reason))
    by, by_none = {"test": "tests/a.py::test"}, {"test": None}
    mutants._keep(flags, {killed: by, equivalent: by_none, new: by_none})
    floor, survivors = map(mutants._read, paths)
    assert floor == {killed: by}
    assert survivors == {equivalent: reason, new: {"reason": ""}}
