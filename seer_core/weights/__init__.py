"""Weights on their way to the engines: versions, copies on disk, tensors in shared memory."""
