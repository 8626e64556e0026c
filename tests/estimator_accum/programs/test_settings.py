"""Settings of the three programs: flags, sizes, configuration files, output folders."""

import dataclasses
import itertools
import json
import pathlib
import re

import pytest
from absl import flags

from bert_finetune.run_classifier import PROGRAM as BERT
from distributed.main import PROGRAM as IMAGES
from estimator_accum.programs.batches import AUTO, Batches
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.flag_values import help_text, read_settings_of
from estimator_accum.programs.folder import check_free
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.job import Job, check_folder, make_job
from estimator_accum.programs.sentences import sentence
from estimator_accum.programs.settings import (
    GROUPS,
    SHARED_FLAGS,
    RunSettings,
    config_text,
    flag,
)
from housing_example.main import PROGRAM as HOUSING
from tests.helpers.models import tiny_bert
from tests.helpers.processes.running import ROOT

pytestmark = pytest.mark.once
_BERT = tiny_bert.command_line(*map(pathlib.Path, ("bert", "cola", "old")))
_PROGRAMS = {
    "bert_finetune": (
        BERT,
        [f"--{name}={value}" for name, value in _BERT.items()]
        + ["--clip_norm=0", "--nodropout", "--learning_rate=1e-4", "--seed=7"],
    ),
    "housing_example": (
        HOUSING,
        ["--train_csv=a.csv", "--noshuffle", "--train_updates=9", "--output_dir=old"],
    ),
    "distributed": (
        IMAGES,
        ["--data_dir=mnist", "--hidden_units=8", "--seed=8", "--output_dir=old"],
    ),
}
_PATHS = ("data_dir", "vocab_file", "bert_config_file", "init_checkpoint", "train_csv")


def _read(program, *arguments):
    values = program.flags()
    return read_settings_of(program.settings, values, ["program", *arguments])


def _refusal(*arguments, program=HOUSING) -> str:
    values = program.flags()
    with pytest.raises((ValueError, flags.Error)) as raised:
        read_settings_of(program.settings, values, ["program", *arguments])
    return sentence(raised.value, values)


@pytest.mark.parametrize("one, other", [*itertools.combinations(_PROGRAMS, 2)])
def test_a_flag_of_two_programs_has_one_meaning(one, other):
    ours, theirs = (_PROGRAMS[name][0].flags() for name in (one, other))
    shared = set(ours) & set(theirs)
    assert {"seed", "micro_batch_size", "watchdog_secs", "config"} < shared
    # GLUE's or MNIST's; those of one device are not for a cluster.
    for name in shared - {"data_dir", "strategy"}:
        assert ours[name].help == theirs[name].help, name
        assert type(ours[name].parser) is type(theirs[name].parser), name


@pytest.mark.parametrize("name", _PROGRAMS)
def test_tables_of_flags_have_the_words_of_help(name):
    page = "docs/bert.md" if name == "bert_finetune" else f"{name}/README.md"
    rows = re.findall(
        r"^\| `--(\w+)` \|.*?\| (.*)", (ROOT / page).read_text(), re.MULTILINE
    )
    shared = {name: text for name, text in rows if name in SHARED_FLAGS}
    assert len(shared) > 5
    for option, text in shared.items():
        said = _PROGRAMS[name][0].flags()[option].help
        assert text.startswith(said[0].lower() + said[1:].rstrip(".")), option


@pytest.mark.parametrize("name", _PROGRAMS)
def test_help_names_every_flag(name):
    values = _PROGRAMS[name][0].flags()
    lines = re.findall(r"^  --.*", help_text(values), re.MULTILINE)
    shown = re.findall(r"--(\w+)", "".join(lines))
    assert sorted(shown) == sorted(set(values) - {"v"}) and set(SHARED_FLAGS) & set(
        shown
    )


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--train_cvs=a", "Received: --train_cvs. Did you mean --train_csv?"),
        ("--train_steps=1", "Received: --train_steps. Did you mean --train_updates?"),
        ("--train_xx=1", "_batch_size or --train_csv or --train_updates?"),
        ("--qqqqqq=1", "Flags must be those of --help. Received: --qqqqqq. See"),
        ("seed=1", "Received: 'seed=1'. Write --flag=value."),
        ("--shuffle=perhaps", "`--shuffle` must be true or false. Received: 'perhaps'"),
        ("--strategy=all", "multi_worker, parameter_server. Received: 'all'."),
        ("--flagfile=/no", "`--flagfile` must name a file that can be read. Received"),
        ("--gradient_accumulation_steps=0", "< 2**31. Received: 0. Use 1 to turn ac"),
        ("--gradient_accumulation_multiplier=1.5", "integer >= 1 and < 2**31. Receive"),
        ("--gradient_accumulation_steps=2147483648", "Received: 2147483648. Use 1"),
        ("--effective_batch_size=0", "`--effective_batch_size` must be an integer >="),
        ("--train_batch_size=0", "`--train_batch_size` must be an integer >= 1 or au"),
        ("--micro_batch_size=many", "`--micro_batch_size` must be an integer >= 1 or"),
        ("--watchdog_secs=0", "`--watchdog_secs` must be an integer >= 1"),
        ("--train_updates=0", "`--train_updates` must be an integer >= 1"),
        ("--learning_rate=0", "`--learning_rate` must be a number > 0 and <= 1e9"),
        ("--learning_rate=nan", "> 0 and <= 1e9. Received: 'nan'. See --help."),
        ("--clip_norm=-1.5", "norm` must be a finite number >= 0. Received: -1.5"),
        ("--clip_norm=inf", "finite number >= 0. Received: 'inf'. Use 0 to turn cli"),
        ("--seed=-1", "`--seed` must be an integer >= 0 and < 2**31. Received: -1."),
        ("--seed=x", "must be an integer >= 0 and < 2**31. Received: 'x'. See --he"),
        ("--seed=1_000", "an integer >= 0 and < 2**31. Received: '1_000'. See --he"),
        ("--seed=1e3", "must be an integer >= 0 and < 2**31. Received: '1e3'. See"),
        ("--seed=１", "must be an integer >= 0 and < 2**31. Received: '１'. See"),
        ("--train_batch_size=1_0", "integer >= 1 or auto. Received: '1_0'. Use auto"),
        ("--learning_rate=1_0e-5", "> 0 and <= 1e9. Received: '1_0e-5'. See --help."),
        ("--verbosity=1_0", "`--verbosity` must be an integer. Received: '1_0'. See"),
        ("--micro_batch_size=4 --train_batch_size=8", "be equal. Received: 4 and 8"),
        (
            "--gradient_accumulation_steps=2 --gradient_accumulation_multiplier=4",
            "`--gradient_accumulation_multiplier` must be equal. Received: 2 and 4.",
        ),
    ],
)
def test_a_flag_that_does_not_fit_is_one_sentence(arguments, expected):
    assert expected in _refusal(*arguments.split())


_TPU = "--nouse_tpu --tpu_name=a --tpu_zone=b --gcp_project=c --master=d "
_TPU += "--num_tpu_cores=8 --iterations_per_loop=1000"


def test_flags_of_googles_bert_that_mean_nothing_here_are_taken():
    arguments = _PROGRAMS["bert_finetune"][1]
    assert _read(BERT, *arguments, *_TPU.split()) == _read(BERT, *arguments)
    assert _refusal("--use_tpu=true", program=BERT) == (
        "`--use_tpu` must be false, since TPUs are not supported. Received: 'true'. "
        "Leave it out; --strategy=mirrored trains on all GPUs of this machine."
    )


@pytest.mark.parametrize("name, value", [("fp16", "float16"), ("bf16", "bfloat16")])
def test_other_projects_names_of_a_flag_are_understood(name, value):
    values = flags.FlagValues()
    flags.DEFINE_string("precision", None, "", flag_values=values)
    with pytest.raises(flags.Error) as raised:
        values(["program", f"--{name}"])
    expected = f"Received: --{name}. Did you mean --precision={value}?"
    assert sentence(raised.value, values).endswith(expected)


def test_required_flags_come_first():
    groups = re.findall(r"^(\w.*):$", help_text(BERT.flags()), re.MULTILINE)
    assert groups == list(GROUPS)
    first = help_text(BERT.flags()).partition("what to do:")[0]
    assert re.findall(r"^  --(\w+)$", first, re.MULTILINE) == [
        *("output_dir", "task_name", "data_dir", "vocab_file", "bert_config_file")
    ]


def test_flags_that_must_be_given_are_named():
    expected = "must be given. Received: none for --task_name, --data_dir, --vocab_file"
    assert expected in _refusal("--output_dir=a", program=BERT)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--gradient_accumulation_multiplier=4", (None, 4)),
        (
            "--gradient_accumulation_multiplier=4 --gradient_accumulation_steps=4",
            (None, 4),
        ),
        ("--train_batch_size=4", (4, None)),
        ("--train_batch_size=auto --micro_batch_size=auto", (AUTO, None)),
        ("", (None, None)),
    ],
)
def test_either_name_of_a_flag_counts(arguments, expected):
    settings = _read(HOUSING, *arguments.split())
    assert (settings.micro_batch_size, settings.gradient_accumulation_steps) == expected


@pytest.mark.parametrize(
    "program, sizes, expected",
    [
        (HOUSING, {}, lambda n: Batches(177 * n, 3, n)),
        (HOUSING, {"micro": 10, "steps": 2}, lambda n: Batches(20 * n, 2, n)),
        (HOUSING, {"effective": 96, "micro": 8}, lambda n: Batches(96, 12 // n, n)),
        # The effective batch does not depend on the workers, if that is not asked for.
        (IMAGES, {}, lambda n: Batches(200, 1, n)),
        (IMAGES, {"micro": 25}, lambda n: Batches(200, 8 // n, n)),
        (IMAGES, {"steps": 2}, lambda n: Batches(200, 2, n)),
        (IMAGES, {"micro": 50, "steps": 2}, lambda n: Batches(100 * n, 2, n)),
        (IMAGES, {"micro": AUTO}, lambda n: Batches(200, 1, n, is_auto=True)),
        (IMAGES, {"effective": 8, "micro": AUTO}, lambda n: Batches(8, 1, n, True)),
    ],
)
def test_sizes_that_are_left_out_are_the_programs_own(program, sizes, expected):
    names = {"effective": "effective_batch_size", "micro": "micro_batch_size"}
    names["steps"] = "gradient_accumulation_steps"
    settings = program.settings(**{names[k]: size for k, size in sizes.items()})
    for replicas in (1, 2, 4):
        assert settings.batches(replicas) == expected(replicas)


@pytest.mark.parametrize("sizes", [[], ["--micro_batch_size=auto"]])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_reads_its_own_settings_back(name, sizes, tmp_path, monkeypatch):
    program, arguments = _PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    first = _read(program, *arguments, *sizes)
    config = tmp_path / "config.json"
    config.write_text(config_text(first))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = _read(program, f"--config={config}", "--output_dir=new")
    there = {
        field: str(tmp_path / path)
        for field, path in dataclasses.asdict(first).items()
        if field in _PATHS and path
    }
    assert there and second == dataclasses.replace(first, output_dir="new", **there)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], (8, 1)),
        (["--seed=2"], (8, 2)),
        (["--micro_batch_size=4"], (4, 1)),
        (["--train_batch_size=4"], (4, 1)),
    ],
)
def test_the_command_line_wins(tmp_path, arguments, expected):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"flags": {"micro_batch_size": 8, "seed": 1}}))
    settings = _read(HOUSING, f"--config={config}", *arguments)
    assert (settings.micro_batch_size, settings.seed) == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            "{",
            r"`--config` must be the settings file of a run. Received: .*config.json, a",
        ),
        ("[]", r"`--config` must be the settings file of a run"),
        ("{}", r"must hold the flags of a run. Received: .*, without 'flags'"),
        ('{"flags": 1}', r"`--config` must hold the flags of a run"),
        (
            '{"flags": {"seed": [1]}}',
            r"string, a number.* Received: .*\[1\] for 'seed'",
        ),
        (
            '{"flags": {"report_to": null}}',
            r"with null for 'report_to'. Correct it, or",
        ),
        ('{"flags": {}, "flags": {}}', r'read \(an object has the key "flags" twice\)'),
        ('{"flags": {"sede": 1}}', r"must hold flags of this program. .* with 'sede'"),
        ('{"flags": {"seed": "x"}}', r"`--seed` must be an integer .* Received: 'x'"),
        (None, r"`--config` must be .*config.json, a file that"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(tmp_path, content, expected):
    config = tmp_path / "config.json"
    if content is not None:
        config.write_text(content)
    assert re.search(expected, _refusal(f"--config={config}"))


def test_remote_paths_stay_as_they_are():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings):
        learning_rate: float = flag(1.0)
        data_dir: str = flag("gs://bucket/data", "Data.", is_path=True)
        init: str | None = flag("a", "Start.", is_path=True, decides=True)

    settings = Settings(output_dir="out")
    assert settings.as_flags()["data_dir"] == "gs://bucket/data"
    assert "output_dir" not in settings.as_flags()
    assert settings.decisive() == {
        "learning_rate": 1.0,
        "seed": 0,
        "precision": "float32",
        "init": str(pathlib.Path("a").absolute()),
    }


def test_a_byte_order_mark_of_a_file_of_flags_is_accepted(tmp_path):
    (tmp_path / "flags").write_text("\ufeff--seed=7\n", encoding="utf-8")
    assert _read(HOUSING, f"--flagfile={tmp_path / 'flags'}").seed == 7


def _job(folder, workers=2, checksum="sum", **changes) -> Job:
    settings = IMAGES.settings(output_dir=str(folder), **changes)
    return make_job(Inputs(settings, Cluster(), None, None, checksum), workers)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"gradient_accumulation_steps": 4}, None),
        ({"micro_batch_size": AUTO}, None),
        ({"watchdog_secs": 9, "workers": 3}, None),
        (
            {"checksum": "another"},
            r"which holds a run with different examples\. Use another",
        ),
        ({"learning_rate": 0.2}, r"holds a run with --learning_rate=0\.1, not 0\.2\. "),
        ({"hidden_units": 65}, r"holds a run with --hidden_units=64, not 65\. "),
        (
            {"effective_batch_size": 100},
            r"holds a run with --effective_batch_size=200, not 100\. ",
        ),
    ],
)
def test_a_run_resumes_with_other_shares_of_the_same_updates_only(
    tmp_path, changes, sentence
):
    _job(tmp_path).write_settings()
    if sentence is None:
        check_folder(_job(tmp_path, **changes))
        return
    with pytest.raises(ValueError, match=sentence):
        check_folder(_job(tmp_path, **changes))


def test_a_folder_of_another_program_is_refused(tmp_path):
    (tmp_path / "model.ckpt-7.index").touch()
    with pytest.raises(ValueError, match=r"model\.ckpt-7\.index and no run_settings"):
        check_free(tmp_path, "*.ckpt*")
    (tmp_path / "run_settings.json").write_text("{")
    check_free(tmp_path, "*.ckpt*")
    with pytest.raises(ValueError, match=r"must be the settings file of a run"):
        check_folder(_job(tmp_path))


def test_micro_batches_that_may_be_run_again_have_no_log():
    _read(IMAGES, "--log_examples", "--micro_batch_size=5")
    said = _refusal("--log_examples", "--micro_batch_size=auto", program=IMAGES)
    assert "Received: --micro_batch_size=auto. Use a number." in said
