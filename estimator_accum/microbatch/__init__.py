"""Whole batches that are trained in micro-batches: `microbatch_model_fn`.

model_fn, whole_batch_loss  the interfaces
batch                       the clock of a train op: one window is one batch
inputs, constants           tensors that hold a batch, or belong to no example
staging, gather             a batch is stored, and sliced
collecting                  values of the batch, from its micro-batches
work, replica               operations beside the train op, by pass of the batch
hooks, runner, count        the passes of a batch, again if memory runs out
outside                     values that the caller of a run asks for
repeatable, writes          what may run twice, and how it is taken back
own_optimizer               model_fns with an optimizer of their own
"""
