// SPDX-License-Identifier: Apache-2.0
// 4x4 transposes of bytes among four neighbouring lanes.
#pragma once

#include <stdint.h>

namespace quads {

// Lane t of four holds bytes 0..3 of a word; afterwards it holds byte t of lanes 0..3. Its own inverse.
struct ByteTranspose {
  uint32_t first, second;
  __device__ __forceinline__ explicit ByteTranspose(int t) : first(t & 1 ? 0x3715 : 0x6240), second(t & 2 ? 0x3276 : 0x5410) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t x) const {
    uint32_t y = __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    x = __byte_perm(x, y, first);
    y = __shfl_xor_sync(0xFFFFFFFFu, x, 2);
    return __byte_perm(x, y, second);
  }
};

}  // namespace quads
