"""changed_tests.py: the test files that depend on a changed file."""

import pytest

from scripts.changed_tests import (
    changed_texts,
    chosen_tests,
    dependencies,
    dependent_tests,
)

pytestmark = pytest.mark.once

_SOURCES = {
    "README.md": "",
    "Dockerfile": "",
    "room/__init__.py": "from room._a import one\nfrom room._b import two",
    "room/_a.py": "one = 1",
    "room/_b.py": "from room import _below\ntwo = 2",
    "room/_below.py": "",
    "room/rules/__init__.py": "from room.rules import rule",
    "room/rules/rule.py": "import room.rules.table",
    "room/rules/table.py": "",
    "room/jobs.py": "PROGRAM, NO_FILE = 'room.main', 'see Dockerfile'",
    "room/main.py": "",
    "tests/conftest.py": "def fixture():\n    from room._a import one",
    "tests/helpers/processes/documents.py": "ROOT.glob('*.md')",
    "tests/room/conftest.py": "RUNS = 'tests/room/test_one.py'",
    "tests/room/test_one.py": "from room import one",
    "tests/room/test_two.py": "from room import two",
    "tests/room/test_rules.py": "import room.rules.table",
    "tests/room/test_run.py": "call(\"-c 'import os'\", '-m room.jobs')",
    "tests/room/test_code.py": "CODE = 'from room._below import x\\nx()'",
    "tests/room/data/a.json": "",
    "tests/room/test_data.py": "ROOT / 'tests' / 'room' / 'data' / f'{name}.json'",
    "tests/test_docs.py": "from tests.helpers.processes import documents",
    "tests/test_architecture.py": "",
}
_ALL = [path for path in _SOURCES if "/test_" in path]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ([], ""),
        (["tests/room/test_two.py"], "two"),
        (["room/_b.py"], "two"),  # no test of `one`, though `room` imports both
        (["room/_below.py"], "code two"),
        (["room/rules/rule.py"], "rules"),
        (["room/main.py"], "run"),  # a module that a string is
        (["room/rules/rule.py", "room/main.py"], "rules run"),
        (["tests/room/data/a.json"], "data"),
    ],
)
def test_tests_depend_on_imports_and_on_files_that_strings_name(changed, tests):
    expected = [f"tests/room/test_{name}.py" for name in tests.split()]
    if any(path.endswith(".py") for path in changed):
        expected += ["tests/test_architecture.py", "tests/test_docs.py"]
    assert dependent_tests(changed, dependencies(_SOURCES)) == expected


@pytest.mark.parametrize("changed", ["room/_a.py", "tests/conftest.py"])
def test_tests_depend_on_the_conftest_above_them(changed):
    assert dependent_tests([changed], dependencies(_SOURCES)) == sorted(_ALL)


def test_pages_have_one_reader_and_other_files_the_tests_of_the_whole_repository():
    graph = dependencies(_SOURCES)
    assert "tests/test_docs.py" in dependent_tests(["README.md"], graph)
    above = [path for path in sorted(_ALL) if path.startswith("tests/test_")]
    assert dependent_tests(["Dockerfile"], graph) == above


def _chosen(changed: str, before: str, after: str, **options) -> list[str]:
    """Returns the names of the tests for a change of one file, without their readers."""
    texts = {changed: changed_texts(before, after)}
    sources = _SOURCES | {changed: after} | _TEXTS
    tests, _ = chosen_tests([changed], texts, sources, **options)
    files = {test.partition("::")[0] for test in tests}
    return sorted(file.rpartition("test_")[2][:-3] for file in files)


_MESSAGE = (
    'def one(x):\n    """One."""\n    raise ValueError(f"`{x}` must be at least %s.")'
)
_TEXTS = {
    "tests/room/test_said.py": r"MATCH = r'`rate` must .* least 2\.'",
    "tests/room/test_other.py": "MATCH = 'must be at most 3', 'at least'",
    "tests/helpers/words.py": "RULE = 'be at least'",
    "tests/hall/test_helped.py": "from tests.helpers.words import RULE",
}


@pytest.mark.parametrize(
    ("old", "new", "tests"),
    [
        ("must be", "has to be", "said"),
        ("at least", "at the least", "helped other"),
        ("must be at", "must at", "helped"),
        ('"""One', '"""The one', ""),
        ("def", "# first\ndef", ""),
    ],
)
def test_tests_of_a_text_have_a_string_that_its_changed_words_match(old, new, tests):
    chosen = _chosen("room/_a.py", _MESSAGE, _MESSAGE.replace(old, new))
    assert chosen == sorted(["architecture", "docs", *tests.split()])


@pytest.mark.parametrize(
    "code", [_MESSAGE.replace("raise", "return"), _MESSAGE.replace("{x}", "{y}"), "("]
)
def test_code_that_has_changed_is_no_text(code):
    assert changed_texts(_MESSAGE, code) is None


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("room/_b.py", "two"),
        ("room/_below.py", "code two"),  # too few of its room, so through others too
        ("tests/room/test_two.py", "two"),
    ],
)
def test_the_nearest_tests_come_first_and_all_if_asked(changed, tests):
    expected = sorted(["architecture", "docs", *tests.split()])
    assert _chosen(changed, "a = 1", "a = 2") == expected
    everything = dependent_tests([changed], dependencies(_SOURCES | _TEXTS))
    assert len(_chosen(changed, "a = 1", "a = 2", takes_all=True)) == len(everything)


def test_of_many_tests_of_a_text_the_nearest_are_chosen():
    others = {f"tests/a/test_{i}.py": "MATCH = 'be at least 2'" for i in range(9)}
    near = {"tests/room/test_near.py": "from room import one\nM = 'be at least 2'"}
    sources = _SOURCES | {"room/_a.py": _MESSAGE} | others | near
    texts = {"room/_a.py": changed_texts(_MESSAGE, _MESSAGE.replace("least", "most"))}
    tests, _ = chosen_tests(["room/_a.py"], texts, sources)
    assert tests >= near.keys() and len(tests & others.keys()) == 3


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def test_one():\n    'be at least 2'\ndef test_two():\n    pass", None),
        ("def test_one():\n    f('be at least 2')\ndef test_two():\n    pass", "one"),
        ("@mark('be at least 2')\ndef test_one():\n    pass", "one"),
        ("A = 'be at least 2'\nB = A\ndef test_one():\n    B", "one"),
        ("def a():\n    return 'be at least 2'\ndef test_one(a):\n    pass", "one"),
        ("f('be at least 2')\ndef test_one():\n    pass", ""),
        ("import words\ndef test_one():\n    words.RULE", "one"),
        ("from words import RULE\nA = RULE\ndef test_one():\n    A", "one"),
        ("from words import OTHER\ndef test_one():\n    OTHER", ""),
    ],
)
def test_of_a_file_the_tests_that_use_a_matching_string_are_chosen(code, tests):
    code = code.replace("words", "tests.helpers.words")
    sources = _SOURCES | {"room/_a.py": _MESSAGE, "tests/test_it.py": code}
    sources["tests/helpers/words.py"] = _TEXTS["tests/helpers/words.py"] + "\nOTHER = 1"
    texts = {"room/_a.py": changed_texts(_MESSAGE, _MESSAGE.replace("least", "most"))}
    chosen, _ = chosen_tests(["room/_a.py"], texts, sources)
    expected = [f"tests/test_it.py::test_{name}" for name in (tests or "").split()]
    expected = [] if tests is None else expected or ["tests/test_it.py"]
    assert sorted(test for test in chosen if "test_it" in test) == expected


def test_a_folder_within_a_room_has_the_rooms_tests():
    sources = _SOURCES | {
        "room/hall/wide.py": "import room.hall.under.deep",
        "room/hall/under/deep.py": "",
        "tests/room/hall/test_wide.py": "import room.hall.wide",
        "tests/room/test_core.py": "import room.hall.wide\npytest.mark.core",
    }
    tests, _ = chosen_tests(["room/hall/under/deep.py"], {}, sources)
    assert "tests/room/hall/test_wide.py" in tests
    assert "tests/room/test_core.py" not in tests
