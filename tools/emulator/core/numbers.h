/* Numbers: bits of floats, 16-bit floats, and the integer instructions that are more than an expression of C. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef u8 pred;

static inline f32 float_of(u32 bits) {
  f32 value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline u32 bits_of(f32 value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline f64 double_of(u64 bits) {
  f64 value;
  memcpy(&value, &bits, 8);
  return value;
}

static inline u64 bits_of_double(f64 value) {
  u64 bits;
  memcpy(&bits, &value, 8);
  return bits;
}

/* Two floats in a register of 64 bits. */
static inline f32 low(u64 bits) { return float_of((u32)bits); }

static inline f32 high(u64 bits) { return float_of((u32)(bits >> 32)); }

static inline u64 pair(f32 low, f32 high) { return (u64)bits_of(high) << 32 | bits_of(low); }

/* A subnormal becomes a zero of its sign, as ".ftz" says. */
static inline f32 flush(f32 value) { return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value; }

/* min and max: of a number and NaN the number, and -0 is less than +0. */
static inline f32 smaller(f32 a, f32 b) {
  if (isnan(a)) return b;
  if (isnan(b)) return a;
  return a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}

static inline f32 larger(f32 a, f32 b) {
  if (isnan(a)) return b;
  if (isnan(b)) return a;
  return a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}

static inline f32 from_bfloat(u16 bits) { return float_of((u32)bits << 16); }

static inline u16 to_bfloat(f32 value) {
  u32 bits = bits_of(value);
  return isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline f32 from_half(u16 bits) {
  u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return copysignf(fraction * 0x1p-24f, float_of(sign));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline u16 to_half(f32 value) {
  u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (isnan(value)) return 0x7fff;
  if (size >= 0x477ff000) return sign | 0x7c00;                                           /* rounds to 65536 or more */
  if (size < 0x38800000) return sign | (u16)(bits_of(float_of(size) + 0.5f) - 0x3f000000);  /* subnormal: in units of 2^-24 */
  return sign | (u16)((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

/* ".satfinite" for a 16-bit float: no more than the largest number. NaN stays. */
static inline f32 finite_half(f32 value) { return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value; }

/* Rounded to TF32, ties away from zero; mma.sync and wgmma ignore the other 13 bits. */
static inline u32 to_tf32(u32 bits) { return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & ~0x1fffu; }

static inline f32 from_tf32(u32 bits) { return float_of(bits & ~0x1fffu); }

static inline s32 truncated(f32 value) {
  if (isnan(value)) return 0;
  return value >= 0x1p31f ? INT32_MAX : value <= -0x1p31f ? INT32_MIN : (s32)value;
}

/* lop3: bit 4 a + 2 b + c of the table is the result for bits a, b, c. */
static inline u32 any_logic(u32 a, u32 b, u32 c, u32 table) {
  u32 result = 0;
  for (int row = 0; row < 8; row++)
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return result;
}

/* bfe: bits first, first + 1, ..., count of them; beyond bit 31 they are its copies, or zero. */
static inline u32 extract_bits(u32 value, u32 first, u32 count, int is_signed) {
  if (count == 0) return 0;
  u32 last = first + count - 1 > 31 ? 31 : first + count - 1;
  u32 sign = is_signed ? value >> last & 1 : 0, result = 0;
  for (u32 bit = 0; bit < 32; bit++) {
    u32 from = first + bit;
    result |= (bit < count && from < 32 ? value >> from & 1 : sign) << bit;
  }
  return result;
}

/* bfi: value with count of its bits, from the first on, replaced by the lowest ones of field. */
static inline u32 insert_bits(u32 field, u32 value, u32 first, u32 count) {
  for (u32 bit = 0; bit < count && bit < 32 && first + bit < 32; bit++)
    value = (value & ~(1u << (first + bit))) | (field >> bit & 1) << (first + bit);
  return value;
}

/* prmt: four bytes of b:a; with bit 3 of a selector, copies of the byte's sign. */
static inline u32 permute_bytes(u32 a, u32 b, u32 selectors) {
  u64 bytes = (u64)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 selector = selectors >> 4 * i & 15, byte = bytes >> 8 * (selector & 7) & 0xff;
    if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

#endif
