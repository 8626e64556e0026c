"""Mutation tests: makes small changes to the code and checks that a test fails.

    python scripts/mutation/mutants.py --record -- -n 3
    python scripts/mutation/mutants.py --keep
    python scripts/mutation/mutants.py --check

The first command records in --map which test runs which line. The second takes a sample
of mutants, runs the tests that run the changed line, and appends a line per mutant to
--results; it resumes if it was interrupted. With --keep the killed mutants go to
--floor, the others to --survivors, where each needs a reason. The third runs each
mutant of --floor again, with the test that killed it. Mutmut is not used because it
renames functions, cosmic-ray because it imports TensorFlow once per mutant. Exit codes:
0; 1 if a mutant of --floor survives or its test fails without it; 2 for invalid flags
or files.
"""

import argparse
import collections
import json
import pathlib
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)
from scripts.mutation.coverage_map import CoverageMap, record
from scripts.mutation.mutate import Mutant, Place, places, sample
from scripts.mutation.run import workers

_SAMPLES = {("estimator_accum",): 170, ("bert_finetune", "distributed"): 60}
_PACKAGES = [package for packages in _SAMPLES for package in packages]


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    flags = _parser().parse_args(arguments)
    flags.root = flags.root.resolve()
    return exit_code_of(lambda: flags.action(flags))


def _parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(__doc__)
    parser.set_defaults(action=_measure)
    for name, default, what in (
        ("map", "mutants_map", "folder of the recorded map"),
        ("results", "mutants.jsonl", "a line a mutant"),
        ("floor", "tests/killed_mutants.jsonl", "mutants that a test kills"),
        ("survivors", "tests/surviving_mutants.jsonl", "others, with reasons"),
        (
            "root",
            pathlib.Path(__file__).resolve().parents[2],
            "tree with code and tests",
        ),
    ):
        what, default = f"{what} (default: %(default)s)", pathlib.Path(default)
        parser.add_argument(f"--{name}", type=pathlib.Path, default=default, help=what)
    parser.add_numbers(
        ("workers", 2, "mutants at a time"),
        ("budget_secs", 90.0, "longest known time of the tests that a mutant gets"),
        ("seed", 1, "of the sample"),
    )
    for name, action, what in (
        ("record", _record, "run the tests, write --map"),
        ("check", _check, "run the mutants of --floor"),
    ):
        options = {"dest": "action", "action": "store_const", "const": action}
        parser.add_argument(f"--{name}", help=what, **options)
    what = "bring --floor and --survivors up to date"
    parser.add_argument("--keep", action="store_const", const="keep", help=what)
    parser.add_argument("pytest", nargs="*", help="for pytest, with --record, after --")
    return parser


def _record(flags: argparse.Namespace) -> int:
    return record(flags.root, flags.map.resolve(), _PACKAGES, flags.pytest)


def _measure(flags: argparse.Namespace) -> None:
    check_counts(flags)
    known = CoverageMap(flags.map)
    drawn: list[Place] = []
    for packages, size in _SAMPLES.items():
        drawn += sample(list(places(flags.root, *packages).values()), size, flags.seed)
    rows = _read(flags.results) if flags.results.exists() else {}
    left = {place.mutant: place for place in drawn if place.mutant not in rows}
    tests = {m: known.chosen(place, flags.budget_secs) for m, place in left.items()}
    with workers(flags.root, flags.workers) as pool, flags.results.open("a") as file:
        chosen = set().union(*tests.values())
        passing = pool.passing(chosen)
        for test in sorted(chosen - passing.keys()):
            print(f"left out, does not pass without a mutant: {test}", flush=True)
        runs = {}
        for mutant, place in left.items():
            own = [test for test in tests[mutant] if test in passing]
            runs[mutant] = own, _deadline_secs(own, passing, known.secs), place
        for mutant, answer in pool.answers(runs):
            row = {"outcome": _outcome(answer), "test": answer["failed"]}
            row |= {"why": answer["why"], "passed": len(answer["passed"])}
            row |= {"chosen": len(runs[mutant][0]), "secs": answer["secs"]}
            rows[mutant] = row | {"covering": len(known.tests(left[mutant]))}
            print(_line(mutant, rows[mutant]), file=file, flush=True)
            print(f"{len(rows)}. {row['outcome']}: {_spoken(mutant)}", flush=True)
    counts = collections.Counter(row["outcome"] for row in rows.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    if flags.keep:
        _keep(flags, rows)


def _deadline_secs(tests: list[str], of_files: dict, of_tests: dict | None = None):
    """Returns 60 s + 5 x the tests' own time + the largest time of their files [s]."""
    own = sum((of_tests or of_files)[test] for test in tests)
    return 60.0 + 5 * own + max((of_files[test] for test in tests), default=0.0)


def _outcome(answer: dict) -> str:
    if answer["failed"]:
        return "timeout" if answer["why"] == "timeout" else "killed"
    return "survived" if answer["passed"] else "not covered"


def _keep(flags: argparse.Namespace, rows: dict[Mutant, dict]) -> None:
    floor, survivors = [
        _read(path) if path.exists() else {} for path in (flags.floor, flags.survivors)
    ]
    for mutant, row in rows.items():
        floor.pop(mutant, None)
        before = survivors.pop(mutant, {"reason": ""})
        if row["test"]:
            floor[mutant] = {"test": row["test"]}
        else:
            survivors[mutant] = before
    for path, kept in ((flags.floor, floor), (flags.survivors, survivors)):
        path.write_text("".join(f"{_line(*each)}\n" for each in sorted(kept.items())))


def _check(flags: argparse.Namespace) -> int:
    check_counts(flags)
    tests = {mutant: row["test"] for mutant, row in _read(flags.floor).items()}
    today = places(flags.root, *_PACKAGES)
    for mutant in sorted(tests.keys() - today.keys()):
        print(f"gone: {_spoken(mutant)}")
        del tests[mutant]
    with workers(flags.root, flags.workers) as pool:
        secs = pool.passing(set(tests.values()))
        runs, survivors = {}, []
        for mutant, test in tests.items():
            if test in secs:
                runs[mutant] = [test], _deadline_secs([test], secs), today[mutant]
            else:
                survivors.append(mutant)
                print(f"does not pass without a mutant: {test}")
        for mutant, answer in pool.answers(runs):
            if not answer["failed"]:
                survivors.append(mutant)
                print(f"survives {tests[mutant]}: {_spoken(mutant)}", flush=True)
    print(f"{len(tests) - len(survivors)} of {len(tests)} mutants killed")
    return int(bool(survivors))


def _read(path: pathlib.Path) -> dict[Mutant, dict]:
    rows = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows[Mutant(*map(row.pop, Mutant._fields))] = row
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} line {number} must be a JSON object with "
                f"{', '.join(Mutant._fields)}. Received: {line[:60]!r}. Remove the line."
            ) from error
    return rows


def _line(mutant: Mutant, row: dict) -> str:
    return json.dumps(mutant._asdict() | row)


def _spoken(mutant: Mutant) -> str:
    name = f"{mutant.path} {mutant.function} {mutant.kind} {mutant.occurrence}"
    return f"{name}: {mutant.original} -> {mutant.replacement or '(nothing)'}"


if __name__ == "__main__":
    sys.exit(main())
