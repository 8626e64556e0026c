"""The planner's command line; its bytes are compared with hand-computed ones."""

import collections
import dataclasses
import json
import pathlib
import re
import shutil
import statistics

import pytest
import tensorflow as tf

from bert_finetune import plan
from bert_finetune.bert_config import BertConfig
from bert_finetune.model_fn import make_model_fn
from bert_finetune.plan_memory import memory_of, parameter_bytes
from bert_finetune.settings import OPTIMIZERS
from bert_finetune.tasks import get_task
from estimator_accum.programs import disk
from estimator_accum.programs.batches import share_out
from tests.helpers.models import tiny_bert
from tests.helpers.models.interfaces import most_bytes_alive, start_session
from tests.helpers.processes import documents

pytestmark = pytest.mark.once
_Usage = collections.namedtuple("_Usage", "free")
_TINY = json.loads("""{
    "vocab_size": 30522, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 512, "max_position_embeddings": 512,
    "type_vocab_size": 2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1
}""")
# google/bert_uncased_L-2_H-128_A-2 has 4,385,920; a two-class classifier adds 258.
_TINY_PARAMETERS = 4 * (4_385_920 + 258)


@pytest.fixture
def config(tmp_path):
    return _write(tmp_path, _TINY)


def _write(folder, content) -> str:
    path = folder / "bert_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def _read(path) -> BertConfig:
    return BertConfig.from_json_file(path, {name: name for name in _TINY})


def _run(config, capsys, *more):
    """Runs the planner; returns (exit code, stdout, stderr)."""
    defaults = ["--effective_batch_size=64", "--device_memory=1GB"]
    code = plan.main([f"--bert_config_file={config}", *defaults, *more])
    return code, *capsys.readouterr()


def _megabytes(output, name):
    return float(re.search(rf"^{name} +([\d,.]+) MB", output, re.MULTILINE)[1])


def test_parameters_are_those_of_the_published_encoder(config):
    assert parameter_bytes(_read(config)) == _TINY_PARAMETERS


def test_the_plan_names_each_part_the_micro_batch_and_k(config, capsys):
    code, output, _ = _run(config, capsys, "--device_memory=250MB")
    assert code == 0
    megabytes = _TINY_PARAMETERS / 1e6
    assert _megabytes(output, "parameters") == pytest.approx(megabytes, abs=0.06)
    slots = _megabytes(output, "optimizer slots")
    assert slots == pytest.approx(2 * megabytes, abs=0.06)
    with_rows = megabytes + 4 * 30522 / 1e6
    assert _megabytes(output, "accumulators") == pytest.approx(with_rows, abs=0.06)
    assert _megabytes(output, "peak of the model") <= 200
    assert "effective batch 64 = 32 examples x 2 micro-steps x 1 replica\n" in output
    assert "micro_batch_size 32\ngradient_accumulation_steps 2\n" in output
    assert "reduction" not in output  # one replica has nobody to reduce with


def test_the_optimizer_decides_on_the_slots_and_is_pasted(config, capsys):
    _, output, _ = _run(config, capsys, "--optimizer=sgd")
    slots = _megabytes(output, "optimizer slots")
    assert slots == pytest.approx(_TINY_PARAMETERS / 1e6, abs=0.06)
    assert output.endswith(" --optimizer=sgd\n")


def test_a_window_of_one_micro_batch_has_no_accumulators(config, capsys):
    _, output, _ = _run(config, capsys, "--device_memory=11GB")
    assert _megabytes(output, "accumulators") == 0
    assert "= 64 examples x 1 micro-step x 1 replica\n" in output


def test_a_sequence_may_take_every_position(config, capsys):
    flags = ["--max_seq_length=512", "--device_memory=11GB"]
    assert _run(config, capsys, *flags)[0] == 0


def test_reduction_is_that_of_a_ring(config, capsys):
    more = ("--num_replicas=4", "--link_speed=100Mbit/s", "--device_memory=11GB")
    _, output, _ = _run(config, capsys, *more)
    secs = 2 * 3 / 4 * _TINY_PARAMETERS / (100e6 / 8)
    assert f"reduction {1e3 * secs:,.1f} ms an update" in output
    assert "= 16 examples x 1 micro-step x 4 replicas\n" in output


def test_one_layer_keeps_its_keys_and_values_alone(tmp_path):
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "type_vocab_size": 1}
    sizes = _read(_write(tmp_path, _TINY | one))
    token, mask = 4 * 128, 128
    kept = memory_of(sizes, 2, 16, is_accumulating=True).activations
    assert kept == 2 * 16 * (2 * token + mask + 2 * token)


@pytest.mark.parametrize("examples", [960, 967])  # 967 is prime
def test_largest_micro_batch_fits_and_one_micro_step_less_does_not(config, examples):
    sizes = _read(config)
    batches, is_recomputed, memory, _ = plan.cheapest_plan(
        sizes, 128, examples, 1, 250e6
    )
    assert not is_recomputed
    steps = batches.gradient_accumulation_steps
    assert steps > 2
    assert memory.peak <= 250e6
    assert memory == memory_of(sizes, batches.largest_share, 128, is_accumulating=True)
    larger = -(-examples // (steps - 1))
    assert memory_of(sizes, larger, 128, is_accumulating=True).peak > 250e6


def test_recomputed_layers_keep_the_inputs_of_their_parts(tmp_path):
    sizes = _read(_write(tmp_path, _TINY | {"num_hidden_layers": 5}))
    token, wide = 4 * 128, 4 * 512
    ours = memory_of(sizes, 256, 16, is_accumulating=True, is_recomputed=True)
    kept = (2 + 3 * 3) * token
    assert ours.activations == 256 * 16 * (kept + 4 * wide + 4 * token)
    scores = 2 * 512  # of 2 heads
    ours = memory_of(sizes, 8, 512, is_accumulating=True, is_recomputed=True)
    attention = 3 * 4 * scores + 4 * token + scores
    assert attention > 4 * wide + 4 * token
    assert ours.activations == 8 * 512 * (kept + attention)


def test_of_few_recomputed_tokens_the_gradients_above_are_the_peak(tmp_path):
    sizes = _read(_write(tmp_path, _TINY | {"num_hidden_layers": 5}))
    ours = memory_of(sizes, 1, 8, is_accumulating=True, is_recomputed=True)
    layers = _TINY_PARAMETERS - 4 * 128 * (30522 + 512 + 2 + 2)  # without embeddings
    head = 4 * (129 * 128 + 129 * 2)
    assert ours.gradients == head + 4 * (layers - head) // 2
    assert ours.activations == 8 * (2 * 512 + 4 * 2048 + 4 * 512)


def test_one_layer_has_nothing_to_recompute(tmp_path):
    sizes = _read(_write(tmp_path, _TINY | {"num_hidden_layers": 1}))
    plans = [
        memory_of(sizes, 2, 16, is_accumulating=True, is_recomputed=is_recomputed)
        for is_recomputed in (False, True)
    ]
    assert plans[0] == plans[1]


_LARGE = _TINY | {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@pytest.mark.parametrize(
    ("memory", "tokens", "vocab_size", "layers"),
    [
        ("11GB", 128, 30522, False),  # micro-steps of 11 examples cost less
        ("8.7GB", 512, 30522, True),  # one example does not fit otherwise
        ("6.5GB", 16, 1000, True),  # micro-steps of so few tokens cost more
    ],
)
def test_the_cheapest_plan_that_fits_is_named(
    memory, tokens, vocab_size, layers, tmp_path, capsys
):
    more = [f"--device_memory={memory}", f"--max_seq_length={tokens}"]
    config = _write(tmp_path, _LARGE | {"vocab_size": vocab_size})
    code, output, _ = _run(config, capsys, *more)
    assert code == 0
    assert (" tokens, recomputed layers\n" in output) == layers
    assert (" --recompute=layers" in output.splitlines()[-1]) == layers
    time = float(re.search(r"^time ([\d.]+) of one", output, re.MULTILINE)[1])
    other = ("none", "layers")[not layers]
    code, output, error = _run(config, capsys, *more, f"--recompute={other}")
    if code == 2:
        assert re.search(r"1 example must fit in `--device_memory`\. Received: ", error)
    else:
        other = re.search(r"^time ([\d.]+) of one", output, re.MULTILINE)[1]
        assert float(other) > time


def test_replicas_need_not_divide_the_effective_batch(config, capsys):
    _, output, _ = _run(config, capsys, "--num_replicas=3", "--device_memory=11GB")
    assert "batch 64 = at most 22 examples x 1 micro-step x 3 replicas\n" in output


@pytest.mark.parametrize(("replicas", "size"), [(2, "1GB"), (3, "1GB"), (3, "250MB")])
def test_the_flags_to_paste_make_the_planned_division(config, capsys, replicas, size):
    _, output, _ = _run(
        config, capsys, f"--num_replicas={replicas}", f"--device_memory={size}"
    )
    *_, pasted = output.splitlines()
    (planned,) = re.findall("^effective batch .*", output, re.MULTILINE)
    names = ("train_batch_size", "effective_batch_size", "gradient_accumulation_steps")
    micro, effective, steps, tokens = (
        (match := re.search(rf"--{name}=(\d+)", pasted)) and int(match[1])
        for name in (*names, "max_seq_length")
    )
    assert str(share_out(effective, micro, steps, replicas)) == planned
    assert tokens == 128


def _train(folder, optimizer, steps, config, examples):
    """Returns the train op of micro-batches [examples, 8], and the run's hook of disks."""
    settings = tiny_bert.make_settings(folder, folder, folder)
    changes = {"init_checkpoint": None, "optimizer": optimizer}
    settings = dataclasses.replace(settings, **changes)
    model_fn = make_model_fn(settings, config, get_task("CoLA"), 9, steps)
    tf.compat.v1.train.create_global_step()
    names = ("input_ids", "input_mask", "segment_ids")
    features = {name: tf.ones([examples, 8], tf.int32) for name in names}
    run_config = tf.estimator.RunConfig(str(folder))
    spec = model_fn(features, tf.zeros([examples], tf.int32), "train", run_config)
    return spec.train_op, disk.DiskSpaceHook(run_config)


@pytest.mark.parametrize(
    ("optimizer", "steps"), [*((name, 1) for name in OPTIMIZERS), ("adamw", 2)]
)
def test_the_disk_space_is_that_of_a_run_but_for_graphs_and_counters(
    optimizer, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(free=0))
    with tf.Graph().as_default() as graph:
        _, hook = _train(tmp_path, optimizer, steps, tiny_bert.CONFIG, 2)
        monkeypatch.setattr(disk, "spoken", str)
        with pytest.raises(OSError, match="needed for checkpoints") as refused:
            hook.begin()
        needed = int(refused.value.strerror.split()[0])
        without_graphs = needed - 6 * graph.as_graph_def().ByteSize()
    memory = memory_of(
        tiny_bert.CONFIG, 4, 16, is_accumulating=steps > 1, optimizer=optimizer
    )
    counters = without_graphs - memory.disk
    assert 0 < counters <= 6 * 64


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_holds_the_gradients_and_its_temporaries(optimizer, tmp_path):
    """With so few tokens it is the peak."""
    sizes = {"vocab_size": 3000, "hidden_size": 256, "intermediate_size": 1024}
    config = _read(_write(tmp_path, _TINY | sizes))
    with tf.Graph().as_default():
        train_op, _ = _train(tmp_path, optimizer, 2, config, 1)
        with start_session() as session:
            updates = []
            for _ in range(3):
                session.run(train_op)
                updates.append(most_bytes_alive(session, train_op))
    update = statistics.median(updates)  # operations overlap in different ways
    memory = memory_of(config, 1, 8, is_accumulating=True, optimizer=optimizer)
    planned = memory.peak - memory.graph
    measured = planned - memory.update + update
    assert planned == pytest.approx(measured, rel=0.15)
    assert memory.update == pytest.approx(update, rel=0.4)


def test_the_page_shows_what_its_command_prints(tmp_path, monkeypatch, capsys):
    page = documents.PAGES["whole_batches"]
    (command,) = [
        c for c in documents.commands(page) if c[:2] == ["estimator-accum", "plan"]
    ]
    (printed,) = documents.blocks(page, "text")
    base = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path("bert", "uncased_L-12_H-768_A-12")
    folder.mkdir(parents=True)
    _write(folder, _TINY | base | {"intermediate_size": 3072})
    assert plan.main(command[2:]) == 0
    assert capsys.readouterr().out == printed
    assert "gradient_accumulation_steps 2\n" in printed


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        *((plan._memory, *row) for row in (("11GB", 11e9), ("16GiB", 2**34))),
        *((plan._memory, *row) for row in (("900 MB", 9e8), ("2g", 2e9))),
        *((plan._speed, *row) for row in (("10Gbit/s", 1e10), ("100Mbit/s", 1e8))),
        *((plan._speed, *row) for row in (("10Gbps", 1e10), ("1.2GB/s", 9.6e9))),
    ],
)
def test_sizes_of_memory_and_speeds_of_links(read, text, expected):
    assert read(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device_memory=50MB"], r"1 example must fit.*Received: 50\.0 MB.*Use sh"),
        (["--max_seq_length=1000"], r"`--max_seq_length` must be at most.*2.*: 1000"),
        (["--max_seq_length=0"], r"--max_seq_length` must be an integer >= 1.*: 0"),
        (["--num_replicas=65"], r"an example for each replica\. Received: 64 for 65"),
        (["--effective_batch_size=-4"], r"--effective_batch_size` must be.*ived: -4"),
    ],
)
def test_flags_that_do_not_fit_are_one_sentence(config, capsys, arguments, sentence):
    code, output, error = _run(config, capsys, *arguments)
    assert (code, output) == (2, "")
    assert re.search(sentence, error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--device_memory=lots", r"must be a size like 11GB.*Received: 'lots'"),
        ("--device_memory=0GB", r"must be a size like 11GB.*Received: '0GB'"),
        ("--device_memory=5e", r"must be a size like 11GB.*Received: '5e'"),
        ("--device_memory=11", r"must be a size like 11GB.*Received: '11'"),
        ("--link_speed=1.2.3GB/s", r"must be a speed like .*Received: '1.2.3GB/s'"),
        ("--link_speed=10", r"must be a speed like 10Gbit/s.*Received: '10'"),
        ("--link_speed=fast", r"must be a speed like 10Gbit/s.*Received: 'fast'"),
    ],
)
def test_units_that_nobody_knows_are_one_sentence(config, capsys, flag, sentence):
    with pytest.raises(SystemExit, match="2"):
        _run(config, capsys, flag)
    assert re.search(sentence, capsys.readouterr().err)


def test_an_unfit_configuration_is_one_sentence(tmp_path, capsys):
    """test_bert_config.py has all of them."""
    code, _, error = _run(_write(tmp_path, "{"), capsys)
    assert code == 2 and error.count("\n") == 1
    assert re.search(r"bert_config.json must hold a JSON object.*not JSON", error)
