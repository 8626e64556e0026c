"""Detection of out-of-memory errors.

On a GPU not all of them are `ResourceExhaustedError`: libraries with their own
allocators report their own codes, and a copy whose target could not be allocated says
"Dst tensor is not initialized" (https://github.com/tensorflow/tensorflow/issues/7025).
"""

import tensorflow as tf

_TEXTS = (
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "hipErrorOutOfMemory",
    "Dst tensor is not initialized",
    "OOM when allocating",
    "out of memory",  # CUDA's runtime
)
# gRPC's error, which a smaller batch may not fix.
_MESSAGE_TOO_LARGE = "message larger than max"


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error`, from a `session.run`, says that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return _MESSAGE_TOO_LARGE not in str(error)
    # Unavailable and Aborted mean a lost peer, not lack of memory.
    kinds = (tf.errors.InternalError, tf.errors.UnknownError)
    return isinstance(error, kinds) and any(text in str(error) for text in _TEXTS)
