"""A shorter scripts/quickstart_demo.py, which trains once within its memory."""

import functools
import sys

from scripts import quickstart_demo

if __name__ == "__main__":
    quickstart_demo.write_demo_data = functools.partial(
        quickstart_demo.write_demo_data, train=64, dev=8
    )
    quickstart_demo.EPOCHS = 1
    command = quickstart_demo.command
    copy = 'cp -r "$0/with_accumulation" "$0/without_accumulation"'
    stands_in = {
        "out_of_memory": "echo OOM when allocating >&2; exit 1",
        "without_accumulation": f"{copy}; echo peak of the model 1.0 MB",
    }
    quickstart_demo.command = lambda folder, name: (
        ["sh", "-c", stands_in[name], folder]
        if name in stands_in
        else command(folder, name)
    )
    sys.exit(quickstart_demo.main())
