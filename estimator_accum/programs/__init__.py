"""Common parts of programs that train; the library itself needs none of them.

These modules read the environment, choose exit codes, make folders and print:

    settings   a dataclass whose fields are flags;  flag_values: its command line
    parsers    values of flags;  command_line: argparse of scripts
    program    steps of all programs;  sentences: errors;  ending: exit codes
    cluster    tasks of a run;  strategies: --strategy
    launchers  from a launcher's variables to a cluster;  tf_config, slurm: two of them
    batches    effective batch = micro-batch x micro-steps x replicas
    inputs     settings and examples, read without TensorFlow
    job        a checked run, its Estimator and log lines
    folder     files of a run;  lock: one run at a time;  disk: room for checkpoints
    plot_loss  the command `plot`;  plots: pictures of runs
    progress   steps and updates done;  saving: the hook that saves checkpoints
    bars       batches done of an evaluation or a prediction
    watchdog   ends a task when another task of the cluster is lost
    launch     starts a command as all tasks of a cluster on this machine
"""
