"""Fixtures of the room's tests: a tiny BERT, a corpus, the settings of a run."""

import pytest
from tiny_bert import write_bert, write_cola

from bert_finetune.settings import Settings


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_bert")
    write_bert(folder)
    return folder


@pytest.fixture(scope="session")
def cola_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_cola")
    write_cola(folder)
    return folder


@pytest.fixture
def settings(bert_dir, cola_dir, tmp_path) -> Settings:
    """A run that does nothing yet: 13 micro-steps of 4, 7 updates, when it trains."""
    return Settings(
        task_name="CoLA",
        data_dir=str(cola_dir),
        vocab_file=str(bert_dir / "vocab.txt"),
        bert_config_file=str(bert_dir / "bert_config.json"),
        output_dir=str(tmp_path / "output"),
        init_checkpoint=str(bert_dir / "bert_model.ckpt"),
        do_lower_case=True,
        max_seq_length=16,
        do_train=False,
        do_eval=False,
        do_predict=False,
        do_export=False,
        train_batch_size=4,
        eval_batch_size=8,
        predict_batch_size=8,
        learning_rate=1e-3,
        num_train_epochs=1.0,
        warmup_proportion=0.1,
        clip_norm=1.0,
        gradient_accumulation_steps=2,
        save_checkpoints_steps=1000,
        dropout=False,
        seed=0,
    )
