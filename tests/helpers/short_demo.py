"""scripts/quickstart_demo.py with less data, pre-training and training."""

import sys

from scripts import make_demo_data, quickstart_demo

_call = quickstart_demo._call


def _call_shorter(*arguments, **options) -> None:
    if "scripts.make_demo_data" in arguments:
        assert make_demo_data.main(list(arguments[2:])) == 0
    elif "train" in arguments:
        _call(*arguments, "--num_train_epochs=1", **options)
    else:
        _call(*arguments, **options)


if __name__ == "__main__":
    quickstart_demo._call = _call_shorter
    make_demo_data.SIZES |= {"num_train": 64, "num_dev": 8, "num_test": 8}
    make_demo_data.SIZES |= {"num_unlabelled": 64}
    make_demo_data.PRETRAINING["num_updates"] = 1
    sys.exit(quickstart_demo.main())
