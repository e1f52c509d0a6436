"""What a launcher needs to know of the device it launches on; one promise: a constant inside torch.compile."""

import torch


@torch.compiler.assume_constant_result
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 elsewhere, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
