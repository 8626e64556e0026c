"""macanv/BERT-BiLSTM-CRF-NER, bert_lstm_ner.py: BERT with a CRF, train_and_evaluate."""

import bench
import made_data
import removed
import tensorflow as tf

v1 = tf.compat.v1
output_dir = bench.begin()
removed.add_crf()
removed.add_module(
    "tensorflow.contrib.layers.python.layers.initializers",
    xavier_initializer=v1.glorot_uniform_initializer,
)

import sys

from bert_base.train import bert_lstm_ner, train_helper

data = made_data.write_tagged(output_dir / "data")
sys.argv[1:] = [
    f"-data_dir={data}",
    f"-vocab_file={made_data.write_vocabulary(output_dir)}",
    f"-bert_config_file={made_data.write_bert_config(output_dir)}",
    "-init_checkpoint=",
    f"-output_dir={output_dir / 'model'}",  # which it empties
    f"-max_seq_length={made_data.TOKENS}",
    f"-batch_size={bench.BATCH}",
    "-num_train_epochs=1",
    "-learning_rate=1e-3",
    "-dropout_rate=1.0",
]
bert_lstm_ner.train(train_helper.get_args_parser())
