"""Common parts of programs that train; the library itself needs none of them.

These modules read the environment, choose exit codes, make folders and print:

    command_line  argparse of scripts
    program    quiet start, flags, one-sentence errors
    ending     exit codes and final messages
    cluster    TF_CONFIG and Slurm;  strategies: --strategy
    batches    effective batch = micro-batch x micro-steps x replicas
    folder     settings of a run;  lock: one run at a time;  disk: room for checkpoints
    progress   steps and updates done;  saving: the hook that saves checkpoints
    bars       batches done of an evaluation or a prediction
    watchdog   ends a task when another task of the cluster is lost
"""
