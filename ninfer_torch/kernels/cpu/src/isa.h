// One instruction set's kernels: included once by each isa_*.cpp, inside namespace ninfer::<name>.

#include "vocabulary.h"
#include "grouped.h"
#include "block_float.h"
#include "row_float.h"
#include "gguf_plain.h"
#include "gguf_k.h"
#include "gguf_iq.h"
#include "kernels.h"
#include "products.h"

using Q4G64 = FourBitBase<4>;
using Q5G64 = FourBitBase<5>;
using Q6G64 = FourBitBase<6>;
using Q2G64 = TwoBitBase<64, false>;
using T2G128 = TwoBitBase<128, true>;

const Kernels* kernels(int format) {
  static constexpr Kernels table[kFormats] = {
      kernels_of<Q2G64>(), kernels_of<Q4G64>(), kernels_of<Q5G64>(), kernels_of<Q6G64>(), kernels_of<Q8G32>(), kernels_of<T2G128>(),
      kernels_of<Nvfp4>(), kernels_of<RowFloat<false>>(), kernels_of<RowFloat<true>>(),
      kernels_of<GgufQ4_0>(), kernels_of<GgufQ5_0>(), kernels_of<GgufQ8_0>(),
      kernels_of<GgufQ2K>(), kernels_of<GgufQ3K>(), kernels_of<GgufQ4K>(), kernels_of<GgufQ5K>(), kernels_of<GgufQ6K>(),
      kernels_of<GgufIq2Xxs>(), kernels_of<GgufIq2Xs>(), kernels_of<GgufIq3Xxs>(), kernels_of<GgufIq1S>(), kernels_of<GgufIq4Nl>(),
      kernels_of<GgufIq3S>(), kernels_of<GgufIq2S>(), kernels_of<GgufIq4Xs>(), kernels_of<GgufIq1M>(), kernels_of<GgufQ2_0>()};
  return &table[format];
}
