"""Commands for scripts that know nothing of the library.

They change what the process has of TensorFlow, and compute nothing: `run` wraps each
model_fn by `microbatch_model_fn`. A wrong number is one of microbatch/own_optimizer/, or of
a rule of rows/rules/, which says which rows belong to which example.
"""
