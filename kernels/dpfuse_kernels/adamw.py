"""Does one step of Adam or AdamW on flat tensors, in one pass over the memory. Knows no bucket and no collective."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfuse_kernels.backend import chooses_triton
from dpfuse_kernels.launch_shape import LaunchShape
from dpfuse_kernels.launcher import launch_flat
from dpfuse_kernels.options import check_factor

if TYPE_CHECKING:
    import triton.language as tl  # at run time `launcher.jit` imports it, before the first launch

__all__ = ["adamw_step"]

GRADS = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)

# Four tensors are read, and up to four written. With 16 elements of each, a thread would take 140 to 154 registers, and
# one program of 8 warps would fill an SM. With 8 elements it takes at most 84. Not yet chosen by measurement.
SHAPE = LaunchShape(chunk=2048, warps=8)


def _adamw_kernel(
    grad_address: tl.int64,  # [numel] WIRE
    param_address: tl.int64,  # [numel] PARAM
    exp_avg_address: tl.int64,  # [numel] float32
    exp_avg_sq_address: tl.int64,  # [numel] float32
    master_address: tl.int64,  # [numel] float32, where MASTER
    factor_address: tl.int64,  # float32, where FACTOR
    numel: tl.int64,
    first_program: tl.int64,
    way: tl.float32,  # these come from `_Numbers`: computed in double precision on the host, and rounded once
    beta2: tl.float32,
    beta2_rest: tl.float32,
    decay: tl.float32,  # of the value where DECOUPLED, for the gradient where COUPLED
    root: tl.float32,
    eps: tl.float32,
    step_size: tl.float32,
    WIRE: tl.constexpr,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    COUPLED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Update one chunk in program p. The order of the operations is that of `adamw_step`.

    Example: betas 0.75 and 0.75, lr 0.5, eps 0, decoupled weight decay 0.5, step 1, states of zeros.
    With param [4, 8] and grad [2, -4], exp_avg is [0.5, -1], exp_avg_sq [1, 4], and param becomes [2.5, 6.5].
    MASTER with master [516, 8]: master becomes [386.5, 6.5], and param in bfloat16 [386, 6.5].
    """
    # Every address is computed in 64 bits: a part may hold more than 2**31 elements.
    start = (first_program + tl.program_id(0).to(tl.int64)) * CHUNK
    length = tl.minimum(numel - start, CHUNK).to(tl.int32)
    grad = grad_address + start * (WIRE.primitive_bitwidth // 8)
    param = param_address + start * (PARAM.primitive_bitwidth // 8)
    exp_avg = exp_avg_address + start * 4
    exp_avg_sq = exp_avg_sq_address + start * 4
    master = master_address + start * 4
    lane = tl.arange(0, CHUNK)
    factor = 1.0
    if FACTOR:
        factor = tl.load(factor_address.to(tl.int64).to(tl.pointer_type(tl.float32)))
    # A multiple of 16 has no bit below 16, and neither has the union of several.
    if (length % 8 == 0) & ((grad | param | exp_avg | exp_avg_sq | master) % 16 == 0):
        # The alignment is known, and the mask keeps groups of eight elements whole: 128-bit loads and stores.
        _adamw_chunk(
            tl.multiple_of(grad.to(tl.pointer_type(WIRE)), 16) + lane,
            tl.multiple_of(param.to(tl.pointer_type(PARAM)), 16) + lane,
            tl.multiple_of(exp_avg.to(tl.pointer_type(tl.float32)), 16) + lane,
            tl.multiple_of(exp_avg_sq.to(tl.pointer_type(tl.float32)), 16) + lane,
            tl.multiple_of(master.to(tl.pointer_type(tl.float32)), 16) + lane,
            lane < length // 8 * 8,
            factor, way, beta2, beta2_rest, decay, root, eps, step_size,
            PARAM, MASTER, FACTOR, MAXIMIZE, DECOUPLED, COUPLED,
        )  # fmt: skip
    else:
        _adamw_chunk(
            grad.to(tl.pointer_type(WIRE)) + lane,
            param.to(tl.pointer_type(PARAM)) + lane,
            exp_avg.to(tl.pointer_type(tl.float32)) + lane,
            exp_avg_sq.to(tl.pointer_type(tl.float32)) + lane,
            master.to(tl.pointer_type(tl.float32)) + lane,
            lane < length,
            factor, way, beta2, beta2_rest, decay, root, eps, step_size,
            PARAM, MASTER, FACTOR, MAXIMIZE, DECOUPLED, COUPLED,
        )  # fmt: skip


def _adamw_chunk(
    grad_ptr: tl.tensor,
    param_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    master_ptr: tl.tensor,
    mask: tl.tensor,
    factor: tl.tensor,
    way: tl.tensor,
    beta2: tl.tensor,
    beta2_rest: tl.tensor,
    decay: tl.tensor,
    root: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    COUPLED: tl.constexpr,
) -> None:
    """Read, update and write the elements of a mask."""
    grad = tl.load(grad_ptr, mask=mask).to(tl.float32)
    value = tl.load(master_ptr if MASTER else param_ptr, mask=mask)
    exp_avg = tl.load(exp_avg_ptr, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr, mask=mask)
    if FACTOR:
        grad = grad * factor
    if MAXIMIZE:
        grad = -grad
    if DECOUPLED:
        value = value * decay
    if COUPLED:
        grad = grad + value * decay
    exp_avg = tl.where(way > 0, exp_avg, grad) + way * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + beta2_rest * grad * grad
    # Rounded as on a CPU: the usual root and division of a GPU may be wrong in the last bits.
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), root) + eps
    value = value - tl.div_rn(step_size * exp_avg, denominator)
    tl.store(exp_avg_ptr, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr, exp_avg_sq, mask=mask)
    tl.store(param_ptr, value.to(PARAM), mask=mask)
    if MASTER:
        tl.store(master_ptr, value, mask=mask)


def adamw_step(
    grad: Tensor,
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decoupled: bool = True,
    maximize: bool = False,
    master: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Do one step of AdamW, or of Adam, on flat tensors, each of which is read and written once.

    For CUDA tensors this is one kernel launch on the current stream. Elements are float32 inside, and each operation is
    rounded by itself, in this order::

        g = grad * factor                                        # a factor of 1 if there is none
        g = -g                                                   # maximize
        p = p * (1 - lr * weight_decay)                          # decoupled (AdamW)
        g = g + p * weight_decay                                 # not decoupled (Adam)
        exp_avg = exp_avg + (1 - beta1) * (g - exp_avg)          # beta1 above 0.5
        exp_avg = g + ((1 - beta1) - 1) * (g - exp_avg)          # any other beta1: from the nearer end
        exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * g * g
        p = p - (lr / (1 - beta1**step) * exp_avg) / (sqrt(exp_avg_sq) / sqrt(1 - beta2**step) + eps)

    That is the order of torch's optimizers with `foreach=False, fused=False`. The quotients and the root are rounded
    to nearest. torch fuses some products with a sum, and its roots may be wrong in the last bit. So the results of one
    step may differ from torch's in the last bits. What has no element, such as 1 - beta1, is computed in double
    precision and rounded once.

    Args:
        grad: [numel] float32, bfloat16 or float16: a rank's part of the averaged gradients, as it was sent.
        param: [numel], is updated; float32, or with `master` bfloat16 or float16.
        exp_avg: [numel] float32, is updated; zeros before the first step.
        exp_avg_sq: [numel] float32, is updated; zeros before the first step.
        step: number of this step, 1 for the first one.
        lr: learning rate. A CUDA graph keeps this number, and those of the other arguments, as they are at capture.
        betas: coefficients of the two averages.
        eps: is added to the root.
        weight_decay: coefficient of the weight decay.
        decoupled: True decays the parameter (AdamW), False adds to the gradient (Adam).
        maximize: whether to go up instead of down.
        master: [numel] float32, is updated; `param` becomes its rounded copy and is not read.
        factor: a float32 scalar on the device that multiplies the gradient, as for clipping.

    Raises:
        ValueError: A tensor has another shape, dtype or device, or is not contiguous; or a number is out of its range.
            Nothing was written.

    Example:
        >>> import torch
        >>> from dpfuse_kernels import adamw_step
        >>> param, exp_avg, exp_avg_sq = torch.tensor([4.0, 8.0]), torch.zeros(2), torch.zeros(2)
        >>> settings = {"lr": 0.5, "betas": (0.75, 0.75), "eps": 0.0, "weight_decay": 0.5}
        >>> adamw_step(torch.tensor([2.0, -4.0]), param, exp_avg, exp_avg_sq, step=1, **settings)
        >>> param, exp_avg, exp_avg_sq
        (tensor([2.5000, 6.5000]), tensor([ 0.5000, -1.0000]), tensor([1., 4.]))

    Source: Loshchilov, Hutter: Decoupled Weight Decay Regularization (arXiv 1711.05101).
    """
    _check(grad, param, exp_avg, exp_avg_sq, master, factor)
    numbers = _numbers(step, lr, betas, eps, weight_decay, decoupled)
    coupled = not decoupled and weight_decay != 0
    decoupled = decoupled and weight_decay != 0
    if not chooses_triton(grad.device):
        _step_reference(grad, param, exp_avg, exp_avg_sq, master, factor, numbers, maximize, decoupled, coupled)
        return
    addresses = [0 if one is None else one.data_ptr() for one in (grad, param, exp_avg, exp_avg_sq, master, factor)]
    launch_flat(
        _adamw_kernel,
        grad,
        grad.numel(),
        # An int, such as an eps of 0, would be another kind of argument.
        (*addresses, grad.numel(), 0, *map(float, astuple(numbers))),
        SHAPE,
        WIRE=grad.dtype,
        PARAM=param.dtype,
        MASTER=master is not None,
        FACTOR=factor is not None,
        MAXIMIZE=maximize,
        DECOUPLED=decoupled,
        COUPLED=coupled,
    )


@torch.no_grad()
def _step_reference(
    grad: Tensor,
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    factor: Tensor | None,
    numbers: _Numbers,
    maximize: bool,
    decoupled: bool,
    coupled: bool,
) -> None:
    """Do the step with torch's own operations, on any device. On the CPU, the bits equal those of the kernel."""
    grad = grad.to(torch.float32)
    value = param if master is None else master
    if factor is not None:
        grad = grad * factor
    if maximize:
        grad = -grad
    if decoupled:
        value.mul_(numbers.decay)
    elif coupled:
        grad = grad + value * numbers.decay
    near = exp_avg if numbers.way > 0 else grad
    torch.add(near, (grad - exp_avg).mul_(numbers.way), out=exp_avg)
    exp_avg_sq.mul_(numbers.beta2).add_((grad * numbers.beta2_rest).mul_(grad))
    # torch's own root of float32 is not always the nearest number on a CPU.
    denominator = exp_avg_sq.double().sqrt_().float().div_(numbers.root).add_(numbers.eps)
    value.sub_((exp_avg * numbers.step_size).div_(denominator))
    if master is not None:
        param.copy_(master)


@dataclass(frozen=True)
class _Numbers:
    """What the kernel gets instead of the hyperparameters, in double precision."""

    # The part of the way from `exp_avg` to the gradient that is added: to `exp_avg` if it is positive, else to the
    # gradient, which is then the nearer end.
    way: float
    beta2: float
    beta2_rest: float  # 1 - beta2, which in float32 would have few correct digits
    decay: float  # a factor of the parameter, or where the decay is not decoupled, of what is added to the gradient
    root: float  # of the second bias correction
    eps: float
    step_size: float  # learning rate over the first bias correction


def _numbers(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
) -> _Numbers:
    if step < 1:
        raise ValueError(f"step is {step}, expected 1 for the first step, and then one more each time. Count from 1.")
    for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if math.isnan(number) or number < 0:
            raise ValueError(f"{name} is {number}, expected 0 or more. Correct it.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas are {betas}, expected two numbers from 0 to below 1, such as (0.9, 0.999). Correct it."
        )
    beta1, beta2 = betas
    weight = torch.tensor(1 - beta1, dtype=torch.float32, device="cpu").item()
    return _Numbers(
        way=weight if weight < 0.5 else weight - 1,
        beta2=beta2,
        beta2_rest=1 - beta2,
        decay=1 - lr * weight_decay if decoupled else weight_decay,
        root=(1 - beta2**step) ** 0.5,
        eps=eps,
        step_size=lr / (1 - beta1**step),
    )


def _check(
    grad: Tensor, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, factor: Tensor | None
) -> None:
    wide = (torch.float32,)
    kinds = {
        "grad": (grad, GRADS),
        "param": (param, wide if master is None else NARROW),
        "exp_avg": (exp_avg, wide),
        "exp_avg_sq": (exp_avg_sq, wide),
        "master": (master, wide),
    }
    shape, device = (grad.numel(),), grad.device
    for name, (tensor, dtypes) in kinds.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            remedy = "Pass a float32 master, too." if name == "param" and tensor.dtype in NARROW else "Convert it."
            raise ValueError(
                f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}"
                f"{'' if name != 'param' else ' without master' if master is None else ' with master'}. {remedy}"
            )
        if tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}, expected "
                f"contiguous, shape {shape} as grad has elements, on {device}. Pass a slice of a flat tensor."
            )
    if factor is not None:
        check_factor(factor, device)
