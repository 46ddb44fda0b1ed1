// Sums, products, minima and maxima of buffers, as a collective computes them: in the order of the ranks, rounded after each.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "nccl_types.hpp"

namespace sim {
inline size_t width(ncclDataType_t t) {
  switch (t) {
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 1;
  }
}

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16() = default;
  Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bool nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = nan ? 0x7fff : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
};

template <class T, class Wide>
void combine(char* into, const char* other, size_t n, ncclRedOp_t op) {
  for (size_t i = 0; i < n; i++) {
    T a, b;
    memcpy(&a, into + i * sizeof(T), sizeof(T));
    memcpy(&b, other + i * sizeof(T), sizeof(T));
    Wide x = (Wide)a, y = (Wide)b;
    T result = (T)(op == ncclMax ? (y > x ? y : x) : op == ncclMin ? (y < x ? y : x) : op == ncclProd ? (Wide)(x * y) : (Wide)(x + y));
    memcpy(into + i * sizeof(T), &result, sizeof(T));
  }
}

template <class T, class Wide>
void divide(char* values, size_t n, int by) {
  for (size_t i = 0; i < n; i++) {
    T a;
    memcpy(&a, values + i * sizeof(T), sizeof(T));
    a = (T)((Wide)a / (Wide)by);
    memcpy(values + i * sizeof(T), &a, sizeof(T));
  }
}

// Whether the type can be reduced.
inline bool reduce_into(char* into, const char* other, size_t n, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8: return combine<int8_t, int8_t>(into, other, n, op), true;
    case ncclUint8: return combine<uint8_t, uint8_t>(into, other, n, op), true;
    case ncclInt32: return combine<int32_t, int32_t>(into, other, n, op), true;
    case ncclUint32: return combine<uint32_t, uint32_t>(into, other, n, op), true;
    case ncclInt64: return combine<int64_t, int64_t>(into, other, n, op), true;
    case ncclUint64: return combine<uint64_t, uint64_t>(into, other, n, op), true;
    case ncclFloat16: return combine<_Float16, float>(into, other, n, op), true;
    case ncclBfloat16: return combine<Bfloat16, float>(into, other, n, op), true;
    case ncclFloat32: return combine<float, float>(into, other, n, op), true;
    case ncclFloat64: return combine<double, double>(into, other, n, op), true;
    default: return false;
  }
}

inline void average(char* values, size_t n, ncclDataType_t type, int by) {
  switch (type) {
    case ncclFloat16: return divide<_Float16, float>(values, n, by);
    case ncclBfloat16: return divide<Bfloat16, float>(values, n, by);
    case ncclFloat32: return divide<float, float>(values, n, by);
    case ncclFloat64: return divide<double, double>(values, n, by);
    default: return;
  }
}
}  // namespace sim
