"""Whether a CUDA device can be used here, and why not."""

from functools import cache


@cache
def why_no_cuda() -> str:
    """The reason for a skip; "" where a device is there."""
    try:
        import torch
    except ImportError:
        return "torch is not installed here"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is here, or its driver is too old for this torch"
    return ""
