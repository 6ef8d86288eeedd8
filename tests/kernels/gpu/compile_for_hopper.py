"""Compiles the Triton kernels for sm_90, down to machine code, on a machine without a GPU. Prints one line a kernel.

Run without TRITON_INTERPRET, in a process of its own: it tells Triton that a Hopper GPU is there, and never launches.
What the interpreter cannot see is found here: types that change in a branch, layouts, registers, shared memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from motet.kernels.attention import PagedBatch
from motet.kernels.gpu import attention, linear, ops, sage_attention
from motet.kernels.linear import quantize_int4, quantize_int8
from motet.kernels.sampling import SamplingRows

SHARED_BYTES = 227 * 1024


class Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    assert len(kernel.asm["cubin"]) > 0
    assert kernel.metadata.shared <= SHARED_BYTES, (self.__name__, kernel.metadata.shared)
    print(
        f"{self.__name__} shared={kernel.metadata.shared} wgmma={kernel.asm['ptx'].count('wgmma.mma_async')}",
        flush=True,
    )
    return kernel


def batch_of(num_seqs: int, rows: int, kv_len: int, mark: Any) -> PagedBatch:
    num_rows = num_seqs * rows
    starts = torch.arange(num_seqs + 1) * rows
    index = torch.zeros(num_rows, dtype=torch.int64)
    return PagedBatch(
        seq=index,
        position=index,
        slots=(index,),
        num_visible=index,
        block_tables=(torch.zeros(num_seqs, kv_len // 16, dtype=torch.int32),),
        kv_lens=torch.full((num_seqs,), kv_len),
        row_starts=starts,
        mark=mark,
        max_kv_len=kv_len,
        block_size=16,
        row_starts_list=tuple(starts.tolist()),
    )


def main() -> None:
    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_only
    attention._device_limits = lambda device: (132, SHARED_BYTES)  # type: ignore[assignment]
    ops._has_e4m3 = lambda device: True
    bf16 = torch.bfloat16

    decode, prefill, verify = (
        batch_of(2, 1, 4096, "decode"),
        batch_of(1, 512, 512, "prefill"),
        batch_of(2, 5, 4096, "mixed"),
    )
    tree = torch.zeros(10, 1, dtype=torch.int64)
    verify = replace(verify, ancestor_mask=tree, tree_starts=torch.zeros(2, dtype=torch.int64))
    for batch, dtype, width, options in [
        (decode, bf16, 128, {"sinks": torch.zeros(32)}),
        (decode, torch.int8, 144, {}),
        (prefill, bf16, 128, {}),
        (prefill, torch.float8_e4m3fn, 144, {"window": 128, "soft_cap": 30.0}),
        (verify, bf16, 128, {}),
    ]:
        q = torch.zeros(len(batch.seq), 32, 128, dtype=bf16)
        kv = torch.zeros(2, 2, 8, 16, width, dtype=dtype)
        assert ops.can_attend(q, kv)
        attention.paged_attention(q, kv, batch, 0, scale=0.1, **options)

    for dim, scales, product, lens in (
        (128, "thread", "fp16", None),
        (64, "thread", "fp8", torch.zeros(1, dtype=torch.int64)),
        (128, "block", "fp8", None),
    ):
        q = torch.zeros(1, 256, 2, dim, dtype=bf16)
        options: dict[str, Any] = {"tail": 0, "scale": 0.1, "causal": False, "return_lse": False}
        sage_attention.sage_attention(q, q, q, lens, scales=scales, product=product, **options)

    qkv, slots = torch.zeros(4, 48, 128, dtype=bf16), torch.zeros(4, dtype=torch.int64)
    q, k, v = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:]
    cos = torch.zeros(4, 32)
    for dtype, width in ((bf16, 128), (torch.int8, 144), (torch.float8_e4m3fn, 144)):
        kv = torch.zeros(2, 2, 8, 16, width, dtype=dtype)
        ops.store_kv(k, v, kv, slots)
        ops.rotary_store_kv(q, k, v, cos, cos, kv, slots)
    ops.copy_slots([kv, kv], slots, slots, 16)
    ops.apply_rotary(q, k, cos, cos, interleaved=True)

    x, weight = torch.zeros(4, 4096, dtype=bf16), torch.zeros(4096, dtype=bf16)
    ops.rms_norm(q, weight[:128], 1e-5)
    ops.rms_norm_residual(x, x.float(), weight, 1e-5)
    ops.silu_mul(x)
    ops.gelu_tanh_mul(x)
    ones = torch.ones(4)
    ops.sample(
        torch.zeros(4, 128256),
        SamplingRows(
            temperature=ones, top_k=slots, top_p=ones, min_p=ones, noise_seed=slots, noise_position=slots, head=3
        ),
    )

    matrix = torch.zeros(256, 4096)
    int4, int8 = (linear.prepare(make(matrix), bf16, matrix.device) for make in (quantize_int4, quantize_int8))
    assert int4 is not None and int8 is not None
    for prepared, rows in ((int4, 1), (int4, 200), (int8, 64)):
        linear.quantized_matmul(torch.zeros(rows, 4096, dtype=bf16), prepared)
    linear.unpack(int4, bf16)
    linear.quantize_rows_on_gpu(x)


if __name__ == "__main__":
    main()
