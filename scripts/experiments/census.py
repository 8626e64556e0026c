"""Made-up rows of the census-income data set with its feature columns."""

import numpy as np
import tensorflow as tf

_columns = tf.feature_column
_NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
_AGES = [18, 25, 30, 35, 40, 45, 50, 55, 60, 65]
_WORDS = {
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov "
    "Without-pay Never-worked ?",
    "education": "Bachelors HS-grad 11th Masters 9th Some-college Assoc-acdm Assoc-voc "
    "7th-8th Doctorate Prof-school 5th-6th 10th 1st-4th Preschool 12th",
    "marital_status": "Married-civ-spouse Divorced Married-spouse-absent Never-married "
    "Separated Married-AF-spouse Widowed",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial "
    "Prof-specialty Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing "
    "Transport-moving Priv-house-serv Protective-serv Armed-Forces ?",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "native_country": "United-States Cambodia England Puerto-Rico Canada Germany "
    "Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran Honduras "
    "Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France "
    "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua "
    "Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong "
    "Holand-Netherlands ?",
}


def rows(number: int) -> tuple[dict, np.ndarray]:
    """Returns made-up rows and labels, 0 or 1."""
    random = np.random.default_rng(0)
    features = {
        name: random.choice(words.split(), [number, 1])
        for name, words in _WORDS.items()
    }
    for name in _NUMBERS:
        features[name] = random.uniform(0, 90, [number, 1]).astype(np.float32)
    return features, random.integers(0, 2, [number, 1])


def wide() -> list:
    """Returns columns of a linear model, with crosses of two and three keys."""
    age = _columns.bucketized_column(_columns.numeric_column("age"), _AGES)
    cross = _columns.crossed_column
    return [
        *_categorical().values(),
        age,
        cross(["education", "occupation"], 1000),
        cross(["native_country", "occupation"], 1000),
        cross([age, "education", "occupation"], 1000),
    ]


def deep() -> list:
    """Returns columns of a network."""
    categorical = _categorical()
    embedded = [categorical.pop(name) for name in ("occupation", "native_country")]
    embedded.append(_columns.crossed_column(["education", "occupation"], 1000))
    return [
        *[_columns.numeric_column(name, normalizer_fn=_small) for name in _NUMBERS],
        *map(_columns.indicator_column, categorical.values()),
        *[_columns.embedding_column(column, 8) for column in embedded],
    ]


def _categorical() -> dict:
    vocabulary = _columns.categorical_column_with_vocabulary_list
    return {name: vocabulary(name, words.split()) for name, words in _WORDS.items()}


def _small(numbers: tf.Tensor) -> tf.Tensor:
    return numbers / 90
