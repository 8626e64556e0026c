"""The accumulation rule.

train_op, optimizer          the two interfaces of `tf.compat.v1`
options, arguments, trained  checks of a caller's arguments
micro_batch                  the terms of one micro-step
window                       the rule: add, close, publish
clock, current_batch         when a window closes
plan, state, step            records: common to micro-steps, variables, tensors
creation, update_step        the variables are made
registry                     all windows of a graph, for hooks
accumulators, reduction      sums of a window, over replicas
slice_list, pulling          sums and weights where parameter servers hold variables
gradients, nonfinite         norms, clipping, policies for NaN
change, changed_slices       code between the mean and the optimizer
linear, multipliers          gradients that need none
applying                     the optimizer's call
noise_scale                  an estimate that a window can add
v1_optimizers, update_ops, interception                     facts about TensorFlow
replica_context, replica_divisor                            facts about its replicas
"""
