"""The package as loaded from the hub, or from a local path in LOCAL_KERNELS, computes what its dense reference does."""

import torch
from kernels import get_kernel


def test_forward_and_backward() -> None:
    relattn = get_kernel("OWNER/triton-relattn", version=0, trust_remote_code=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes = ((1, 2, 70, 16),) * 3 + ((139, 16),)
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    results = []
    for implementation in (None, "reference"):
        out = relattn.fused_relative_attention(*inputs, implementation=implementation)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    tolerance = 1e-2 if device == "cuda" else 1e-4  # a GPU's matrix units round to tf32
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
