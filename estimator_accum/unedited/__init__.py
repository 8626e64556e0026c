"""Scripts and model_fns that know nothing of this library.

run.py, check.py     the commands `estimator-accum run` and `check`
_command.py          what the two share: the script, its flags, its process
_estimators.py       cuts the batches of all Estimators of a process
_session_loops.py    accumulates over `session.run` calls of a script's own loop
_comparison.py       trains at once and in micro-batches, and compares
_rows.py ...         finds where to cut a model_fn's graph: see docs/architecture.md
"""
