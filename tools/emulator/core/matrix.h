/* Matrices as mma.sync and wgmma take them: 16 rows of a warp on the left, columns on the right, a slice of what is summed. */
#ifndef MATRIX_H
#define MATRIX_H

#include "emulator.h"

typedef enum { HALF, BFLOAT, TF32 } ElementType;
typedef f32 Left[16][16];
typedef f32 Right[256][16];
typedef f64 Sums[16][256];

static inline f32 element(u16 bits, ElementType type) { return type == BFLOAT ? from_bfloat(bits) : from_half(bits); }

void read_left(const Emulator *e, const Warp *w, const Operand *o, ElementType type, Left left);
void read_sums(const Emulator *e, const Warp *w, const Operand *o, int count, Sums sums);
void write_sums(Warp *w, const Operand *o, int count, Sums sums);
void add_product(Sums sums, Left left, Right right, int columns, int depth);

#endif
