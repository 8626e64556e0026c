"""Layers whose activations are computed again when their gradient arrives.

    forward     y = layer(x)                        keeps x, frees what is inside
    backward    dy arrives, then layer(x) again, then dx

The backward pass of a recomputed layer is the one that TensorFlow derives, moved: its
operations, and the operations of the layer that they need, are copied, and the copies
read what is kept through gates that open when `dy` is there:

    kept -> gate -> copy of the layer -> copy of its backward pass -> dx
             ^                            ^
             dy --------------------------'

So nothing is derived in a second way: masks, custom gradients, branches and sparse
gradients are the same operations with the same inputs. An operation that reads or
changes state, such as a random number, a variable's value or a side effect, is never
run again. Its result is kept; masks, which are bool, take one bit per element.

Where `microbatch_model_fn` chooses, the backward pass is there twice, and a switch, fed
with every run, opens one of the two and drops what only the other one reads:

    kept -> switch -> gate -> copy of the layer -> copy of its backward pass -> merge
                 `---------------------------------------> backward pass -----> merge
"""
