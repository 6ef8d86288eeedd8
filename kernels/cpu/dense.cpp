// torch.ops.motet_cpu.dense_attention: packs keys and values, then shares tiles of rows among torch's threads.
#include "ops.h"

namespace {

using motet::kDenseBlock;
using motet::kDenseRows;

bool has_dense_attention() { return table().dense != nullptr; }

// q, k, v bf16 [B, T, H, D] with contiguous D -> [B, T, H * D].
Tensor dense_attention(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const motet::Table& cpu = table();
  TORCH_CHECK(cpu.dense, "dense_attention: this CPU has no bf16 dot product");
  for (const Tensor* x : {&q, &k, &v})
    TORCH_CHECK(x->dim() == 4 && x->sizes() == q.sizes() && x->stride(3) == 1 && x->scalar_type() == at::kBFloat16,
                "dense_attention: expected bf16 [B, T, H, D] with contiguous D, got ", x->scalar_type(), " ",
                x->sizes());
  TORCH_CHECK(scale > 0, "dense_attention: scale ", scale);
  const int64_t windows = q.size(0), rows = q.size(1), heads = q.size(2), dim = q.size(3);
  const int64_t width = motet::padded_dim(dim), blocks = (rows + kDenseBlock - 1) / kDenseBlock;
  Tensor out = at::empty({windows, rows, heads * dim}, q.options());
  Tensor packed = at::empty({2, windows, heads, blocks * kDenseBlock, width}, q.options());

  motet::Dense a{};
  a.q = bytes(q), a.q_window = q.stride(0), a.q_row = q.stride(1), a.q_head = q.stride(2);
  a.k = bytes(k), a.k_window = k.stride(0), a.k_row = k.stride(1), a.k_head = k.stride(2);
  a.v = bytes(v), a.v_window = v.stride(0), a.v_row = v.stride(1), a.v_head = v.stride(2);
  a.out = mutable_bytes(out);
  a.packed_k = reinterpret_cast<uint32_t*>(mutable_bytes(packed));
  a.packed_v = a.packed_k + packed.numel() / 4;  // a word holds two bf16, and the values are the second half
  a.rows = rows, a.num_heads = heads, a.dim = dim, a.scale = (float)scale;

  const int64_t size = motet::dense_scratch(dim);
  share(windows * heads * blocks, packed.numel() > 65536, [&](int64_t i) {
    cpu.dense_pack(a, i / blocks / heads, i / blocks % heads, i % blocks, scratch(0, size));
  });
  const int64_t tiles = (rows + kDenseRows - 1) / kDenseRows;
  share(windows * heads * tiles, windows * heads * rows * rows * dim > 1000000, [&](int64_t i) {
    const int64_t begin = i % tiles * kDenseRows;
    cpu.dense(a, i / tiles / heads, i / tiles % heads, begin, std::min(begin + kDenseRows, rows), scratch(0, size));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(motet_cpu, m) {
  m.def("dense_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor");
  m.def("has_dense_attention() -> bool", &has_dense_attention);
}
TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) { m.impl("dense_attention", &dense_attention); }
