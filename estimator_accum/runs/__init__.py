"""What programs that train have in common; the library itself needs none of it.

Here, and nowhere else in this package but in `compat`, the environment is read, exit
codes are chosen, folders are made and words are printed:

    command_line  argparse of scripts
    program    a quiet start, flags, refusals in one sentence
    ending     exit codes and last words
    cluster    TF_CONFIG and Slurm;  strategies: --strategy
    batches    effective batch = micro-batch x micro-steps x replicas
    folder     settings of a run;  lock: one run at a time;  disk: room for checkpoints
    progress   where a run stands;  saving: the hook that saves checkpoints
    watchdog   tasks of a cluster that are lost
"""
