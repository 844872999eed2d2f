"""Weight sources for tests, imported by workers."""

import numpy as np
import torch


class Shared:
    """Reads float32 tensors from memory that a trainer shares: ``table`` says where each begins."""

    def __init__(self, settings):
        self.memory, self.table = settings["memory"], settings["table"]

    def tensors(self):
        values = np.memmap(self.memory, np.float32, "c")
        for name, shape, begin in self.table:
            yield name, torch.from_numpy(values[begin : begin + int(np.prod(shape))].reshape(shape))
