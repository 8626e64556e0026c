"""Inputs of a run: CSV files, or data that is generated; needs no TensorFlow."""

from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.folder import check_free, check_output_dir
from estimator_accum.programs.inputs import Inputs
from housing_example import demo_data, table
from housing_example.settings import Settings

_FOREIGN = "[!.]*"  # files in a folder that is not of a run
_ALONE = Cluster()


def read(settings: Settings, cluster: Cluster = _ALONE) -> Inputs:
    """Reads, splits and checks all examples, and the output folder; writes nothing.

    Args:
        settings: Settings of the run, which `check` has accepted.
        cluster: Cluster of which this process is a task.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    check_output_dir(settings.output_dir)
    if cluster.is_chief:  # the others may be late, when the chief's files are there
        check_free(settings.output_dir, _FOREIGN)
    if settings.train_csv:
        train = table.read_table(settings.train_csv)
    else:
        train = demo_data.generate()
    if settings.test_csv:
        test = table.read_table(settings.test_csv)
    else:
        train, test = table.split(train, settings.train_csv or "the data")
    return Inputs(settings, cluster, train, test, table.checksum(train, test))
