// Products of bfloat16 tiles in a processor's matrix units (AMX).
#pragma once

#include <cstdint>

namespace ninfer {

static constexpr int kTile = 16;         // rows of a tile, of weights and of activations
static constexpr int kTileColumns = 32;  // columns that a tile holds at a time

// Whether this processor has such units and the operating system lets this process use them.
bool has_matrix_units();

// The state that one thread's products need, from construction to destruction.
class MatrixUnits {
 public:
  MatrixUnits();
  ~MatrixUnits();
  MatrixUnits(const MatrixUnits&) = delete;
  MatrixUnits& operator=(const MatrixUnits&) = delete;
};

// 2 * kTile weight rows times one or two tiles of activation rows.
struct TileProduct {
  const uint16_t* weights;         // [2 * kTile, depth] bfloat16 words; depth is a multiple of kTileColumns
  const uint16_t* activations[2];  // [depth / 2, kTile, 2] each; the second may be null
  int64_t depth;
  const float* bias;  // of the weight rows, or null
  uint16_t* y;        // [activation rows, stride] bfloat16, the first weight row's column
  int64_t stride;
  int rows, counts[2];  // weight rows, and activation rows of each tile, that are written
};

// Sums of products are float32, rounded once; sums below the smallest normal number are zero.
void multiply_tiles(const TileProduct& p);

}  // namespace ninfer
