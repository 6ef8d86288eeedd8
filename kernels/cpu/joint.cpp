// torch.ops.motet_cpu.joint_blocks: blocks of a Flux-shaped transformer over words and a picture.
//
// Each row of the batch is one picture with its own words: a thread takes it through all blocks by itself, its numbers never leave the
// cache, and nobody waits between layers. Where rows are fewer than threads, the threads share the row's products. Padding behind
// a row's words is skipped.
#include <ATen/ops/zeros.h>

#include "ops.h"

namespace {

using motet::After;
using motet::Joint;
using motet::kColumns;
using motet::Product;
using motet::Table;

// A packed weight [out / 64, in / P, 64, P] and its bias.
struct Layer {
  Product product;
  int64_t tiles() const { return product.out / kColumns; }
};

// What a stream of tokens has of its own in a block.
struct Stream {
  Layer qkv, out, up, down;
  const float *norm_q, *norm_k;
};

struct Network {
  const Table* cpu;
  Type type;
  int64_t width, heads, dim, num_words, picture;
  const float *cos, *sin;  // [picture, dim]
  float eps;
  std::vector<std::array<Stream, 2>> doubles;  // words, picture
  std::vector<Stream> singles;                 // `down` takes attention and MLP side by side; no `out`
};

// Reads the weights in order.
struct Reader {
  const at::TensorList list;
  Type type;
  size_t at = 0;

  const float* vector(int64_t size) {
    const Tensor& x = next();
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() == size, "joint_blocks: tensor ", at - 1,
                ": expected fp32 [", size, "], got ", x.sizes());
    return x.const_data_ptr<float>();
  }
  Layer layer(int64_t in, int64_t out) {
    const Tensor& x = next();
    const int64_t per_word = type == Type::bf16 ? 2 : 1;
    TORCH_CHECK(x.dim() == 4 && x.is_contiguous() && type_of(x) == type && x.size(0) * kColumns == out &&
                    x.size(1) * per_word == in && x.size(2) == kColumns && x.size(3) == per_word,
                "joint_blocks: tensor ", at - 1, ": expected a packed weight [", out, ", ", in, "], got ", x.sizes());
    return {{x.const_data_ptr(), vector(out), in, out}};
  }
  const Tensor& next() {
    TORCH_CHECK(at < list.size(), "joint_blocks: too few weights");
    return list[at++];
  }
};

// One picture on its way. `hidden` fp32 [S, D]: words, then the picture; the others in the network's type.
struct Way {
  const Network& net;
  int64_t words, tokens;  // S
  float* hidden;
  char *normed, *qkv, *wide;  // [S, D], [S, 3 D], [S, 5 D]
  int64_t size() const { return size_of(net.type); }

  static int64_t floats(const Network& net, int64_t tokens) {
    return tokens * net.width * (1 + 9) + 64;
  }
  Way(const Network& net, int64_t words, float* memory) : net(net), words(words), tokens(words + net.picture), hidden(memory) {
    normed = reinterpret_cast<char*>(hidden + tokens * net.width);
    qkv = normed + tokens * net.width * size();
    wide = qkv + 3 * tokens * net.width * size();
  }

  void product(const Layer& layer, const char* x, int64_t x_row, int64_t begin, int64_t end, After after, char* y, int64_t y_row,
               const float* gate) const {
    // Pieces for threads that have nothing else: of the columns, so that each reads its weights once.
    const int64_t tiles = layer.tiles(), pieces = std::min<int64_t>(tiles, at::in_parallel_region() ? 1 : at::get_num_threads());
    share(pieces, pieces > 1, [&](int64_t piece) {
      net.cpu->product(net.type, layer.product, x, x_row, begin, end, tiles * piece / pieces, tiles * (piece + 1) / pieces, after, y,
                       y_row, gate);
    });
  }
  void modulate(int64_t begin, int64_t end, const float* shift, const float* scale) const {
    for (int64_t t = begin; t < end; ++t)
      net.cpu->modulate(net.type, net.width, hidden + t * net.width, shift, scale, 1e-6f, normed + t * net.width * size());
  }
  void norm_turn(int64_t begin, int64_t end, const Stream& stream) const {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t place = t - words;
      const float *cos = place < 0 ? nullptr : net.cos + place * net.dim, *sin = place < 0 ? nullptr : net.sin + place * net.dim;
      char* row = qkv + t * 3 * net.width * size();
      for (int64_t head = 0; head < net.heads; ++head, row += net.dim * size()) {
        net.cpu->norm_turn(net.type, net.dim, stream.norm_q, net.eps, cos, sin, row);
        net.cpu->norm_turn(net.type, net.dim, stream.norm_k, net.eps, cos, sin, row + net.width * size());
      }
    }
  }
  // Into rows of `out_row` numbers.
  void attend(char* out, int64_t out_row) const {
    const int64_t part = net.width * size();
    const Joint joint{qkv, qkv + part, qkv + 2 * part, 3 * net.width, out, out_row, tokens, net.dim,
                      1.0f / std::sqrt(static_cast<float>(net.dim))};
    share(net.heads, true, [&](int64_t head) {
      net.cpu->attend_joint(net.type, joint, head, scratch(1, motet::joint_scratch(tokens, net.dim)));
    });
  }

  // mods [12 D]: of the picture, then of the words; each shift, scale, gate, and the same of its MLP.
  void double_block(const std::array<Stream, 2>& streams, const float* mods) const {
    const int64_t d = net.width;
    for (int part = 0; part < 2; ++part) {
      const int64_t begin = part ? words : 0, end = part ? tokens : words;
      const float* mod = mods + (part ? 0 : 6 * d);
      modulate(begin, end, mod, mod + d);
      product(streams[part].qkv, normed, d, begin, end, After::store, qkv, 3 * d, nullptr);
      norm_turn(begin, end, streams[part]);
    }
    attend(normed, d);
    for (int part = 0; part < 2; ++part) {
      const int64_t begin = part ? words : 0, end = part ? tokens : words;
      const float* mod = mods + (part ? 0 : 6 * d);
      const Stream& stream = streams[part];
      const int64_t inner = stream.up.product.out;
      product(stream.out, normed, d, begin, end, After::add, reinterpret_cast<char*>(hidden), d, mod + 2 * d);
      modulate(begin, end, mod + 3 * d, mod + 4 * d);
      product(stream.up, normed, d, begin, end, After::gelu, wide, inner, nullptr);
      product(stream.down, wide, inner, begin, end, After::add, reinterpret_cast<char*>(hidden), d, mod + 5 * d);
    }
  }
  // mods [3 D]: shift, scale, gate.
  void single_block(const Stream& stream, const float* mods) const {
    const int64_t d = net.width, both = d + stream.up.product.out;
    modulate(0, tokens, mods, mods + d);
    product(stream.qkv, normed, d, 0, tokens, After::store, qkv, 3 * d, nullptr);
    norm_turn(0, tokens, stream);
    product(stream.up, normed, d, 0, tokens, After::gelu, wide + d * size(), both, nullptr);
    attend(wide, both);
    product(stream.down, wide, both, 0, tokens, After::add, reinterpret_cast<char*>(hidden), d, mods + 2 * d);
  }
};

// tokens fp32 [R, L + T, D], words in front, padded to L; lengths int32 [R] or none: all L. mods fp32 [R, ..], those of these blocks
// in order from `mod_begin`. cos, sin fp32 [T, dim]. -> fp32 [R, L + T, D], zeros at padding.
Tensor joint_blocks(const Tensor& tokens, const std::optional<Tensor>& lengths, int64_t num_words, const Tensor& mods,
                    int64_t mod_begin, const Tensor& cos, const Tensor& sin, at::TensorList weights, int64_t num_double,
                    int64_t num_single, int64_t heads, double eps) {
  TORCH_CHECK(tokens.dim() == 3 && tokens.is_contiguous() && tokens.scalar_type() == at::kFloat,
              "joint_blocks: expected contiguous fp32 tokens [R, S, D]");
  TORCH_CHECK(!weights.empty(), "joint_blocks: no weights");
  const int64_t rows = tokens.size(0), all = tokens.size(1), width = tokens.size(2);
  Network net{};
  net.cpu = &table();
  net.type = type_of(weights[0]);
  TORCH_CHECK(net.type == Type::fp32 || net.cpu->dense, "joint_blocks: this CPU has no bf16 dot product");
  net.width = width, net.heads = heads, net.dim = heads > 0 ? width / heads : 0, net.num_words = num_words;
  net.picture = all - num_words, net.eps = static_cast<float>(eps);
  TORCH_CHECK(heads > 0 && width % kColumns == 0 && net.dim * heads == width && net.dim % 16 == 0 && num_words >= 0 &&
                  net.picture > 0, "joint_blocks: sizes ", tokens.sizes(), ", heads ", heads, ", words ", num_words);
  for (const Tensor* turn : {&cos, &sin})
    TORCH_CHECK(turn->is_contiguous() && turn->scalar_type() == at::kFloat && turn->dim() == 2 &&
                    turn->size(0) == net.picture && turn->size(1) == net.dim, "joint_blocks: cos and sin must be fp32 [T, dim]");
  net.cos = cos.const_data_ptr<float>(), net.sin = sin.const_data_ptr<float>();
  const int64_t num_mods = num_double * 12 * width + num_single * 3 * width;
  TORCH_CHECK(mods.dim() == 2 && mods.is_contiguous() && mods.scalar_type() == at::kFloat && mods.size(0) == rows &&
                  mod_begin >= 0 && mod_begin + num_mods <= mods.size(1), "joint_blocks: mods ", mods.sizes());
  TORCH_CHECK(!lengths || (lengths->scalar_type() == at::kInt && lengths->is_contiguous() && lengths->numel() == rows),
              "joint_blocks: lengths must be int32 [R]");

  Reader read{weights, net.type};
  const int64_t inner = 4 * width;
  for (int64_t i = 0; i < num_double; ++i) {
    std::array<Stream, 2> streams{};
    for (Stream& s : streams) {
      s.qkv = read.layer(width, 3 * width);
      s.norm_q = read.vector(net.dim), s.norm_k = read.vector(net.dim);
      s.out = read.layer(width, width), s.up = read.layer(width, inner), s.down = read.layer(inner, width);
    }
    net.doubles.push_back(streams);
  }
  for (int64_t i = 0; i < num_single; ++i) {
    Stream s{};
    s.qkv = read.layer(width, 3 * width);
    s.norm_q = read.vector(net.dim), s.norm_k = read.vector(net.dim);
    s.up = read.layer(width, inner), s.down = read.layer(width + inner, width);
    net.singles.push_back(s);
  }
  TORCH_CHECK(read.at == weights.size(), "joint_blocks: ", weights.size(), " weights, ", read.at, " expected");

  Tensor out = at::zeros(tokens.sizes(), tokens.options());
  const float* from = tokens.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const float* mod = mods.const_data_ptr<float>() + mod_begin;
  const int32_t* length = lengths ? lengths->const_data_ptr<int32_t>() : nullptr;
  auto take = [&](int64_t row) {
    const int64_t words = length ? std::clamp<int64_t>(length[row], 0, num_words) : num_words;
    Way way(net, words, scratch(0, Way::floats(net, all)));
    const size_t word_floats = words * width, picture_floats = net.picture * width;
    std::memcpy(way.hidden, from + row * all * width, word_floats * 4);
    std::memcpy(way.hidden + word_floats, from + (row * all + num_words) * width, picture_floats * 4);
    const float* mine = mod + row * mods.size(1);
    for (const auto& streams : net.doubles) way.double_block(streams, mine), mine += 12 * width;
    for (const Stream& stream : net.singles) way.single_block(stream, mine), mine += 3 * width;
    std::memcpy(to + row * all * width, way.hidden, word_floats * 4);
    std::memcpy(to + (row * all + num_words) * width, way.hidden + word_floats, picture_floats * 4);
  };
  // Whole rounds of a row for each thread; what is left over, by all threads together.
  const int64_t threads = at::get_num_threads(), left = rows < 4 * threads ? rows % threads : 0;
  share(rows - left, true, take);
  for (int64_t row = rows - left; row < rows; ++row) take(row);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(motet_cpu, m) {
  m.def(
      "joint_blocks(Tensor tokens, Tensor? lengths, int num_words, Tensor mods, int mod_begin, Tensor cos, Tensor sin, "
      "Tensor[] weights, int num_double, int num_single, int heads, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) { m.impl("joint_blocks", &joint_blocks); }
