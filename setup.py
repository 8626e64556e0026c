"""Installs the library and its example rooms; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="estimator-accum",
    version="0.1.0",
    description=(
        "Gradient accumulation for tf.estimator and tf.compat.v1: small batches, "
        "the big batch's weights"
    ),
    # `distributed`, `scripts` and `tests` stay at the repository root: another project
    # is imported as `distributed`, and the other two names belong to everybody.
    packages=find_packages(
        include=[
            f"{room}{part}"
            for room in ("estimator_accum", "bert_finetune", "housing_example")
            for part in ("", ".*")
        ]
    ),
    # scripts/environment.sh looks for these interpreters.
    python_requires=">=3.10,<3.14",
    install_requires=[
        # The last TensorFlow that carries tf.estimator; it stops at Python 3.11.
        "tensorflow>=2.15,<2.16; python_version<'3.12'",
        "numpy<2; python_version<'3.12'",
        # Later ones run it through estimator_accum.compat, with Keras 2.
        "tensorflow>=2.21,<2.22; python_version>='3.12'",
        "tf_keras>=2.21,<2.22; python_version>='3.12'",
        # TensorFlow's tf.summary.scalar is TensorBoard's; 2.21 no longer brings it.
        "tensorboard>=2.21,<2.22; python_version>='3.12'",
        "tensorflow-estimator==2.15.0",
        "pandas",
        "matplotlib",
        "tokenizers",
        "tqdm",
        "wrapt",
        "absl-py",
        "safetensors",
        "filelock",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.7",
            "psutil",
            "coverage>=7.10",
            "hypothesis",
            "pyyaml",
            # One formatter version everywhere: its output is part of the tests.
            "ruff==0.17.5",
            # The last major version that has BERT in TensorFlow, to compare with.
            "transformers>=4.57,<5",
        ]
    },
)
