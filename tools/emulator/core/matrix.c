/* ldmatrix, stmatrix and mma.sync. Sums are exact to double precision and rounded once; matrix units round more often. */
#include "matrix.h"

static void check_address(Emulator *e, const Warp *w, u64 address, int lane) {
  if (address % 16) report(e, w, MISALIGNED, lane, address, -1, -1);
}

/* detail: matrices, whether they are transposed. Operands: a register for each matrix, address. Lane l of 8 i + r addresses row r
   of matrix i; each lane gets two neighbours of a row (a column) of each. */
void load_matrices(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  int count = i->detail[0], transposed = i->detail[1];
  Lanes address, result[4];
  addresses(e, w, &o[count], address);
  for (int matrix = 0; matrix < count; matrix++) {
    u16 rows[8][8];
    memset(rows, 0xff, sizeof rows);
    for (int r = 0; r < 8; r++) {
      int lane = 8 * matrix + r;
      check_address(e, w, address[lane], lane);
      const u8 *bytes = shared_read(e, w, (u32)address[lane], 16, lane);
      if (bytes) memcpy(rows[r], bytes, 16);
    }
    for (int lane = 0; lane < LANES; lane++) {
      int row = lane / 4, column = 2 * (lane % 4);
      u32 low = transposed ? rows[column][row] : rows[row][column];
      u32 high = transposed ? rows[column + 1][row] : rows[row][column + 1];
      result[matrix][lane] = low | high << 16;
    }
  }
  for (int matrix = 0; matrix < count; matrix++) write_lanes(w, &o[matrix], result[matrix], active);
}

/* The reverse. Operands: address, a register for each matrix. */
void store_matrices(Emulator *e, Warp *w, const Instruction *i, const Operand *o) {
  int count = i->detail[0], transposed = i->detail[1];
  Lanes address, scratch;
  addresses(e, w, &o[0], address);
  for (int matrix = 0; matrix < count; matrix++) {
    u16 rows[8][8];
    const u64 *values = source(e, w, &o[1 + matrix], scratch);
    for (int lane = 0; lane < LANES; lane++) {
      int row = lane / 4, column = 2 * (lane % 4);
      for (int half = 0; half < 2; half++) {
        u16 value = values[lane] >> 16 * half;
        if (transposed)
          rows[column + half][row] = value;
        else
          rows[row][column + half] = value;
      }
    }
    for (int r = 0; r < 8; r++) {
      int lane = 8 * matrix + r;
      check_address(e, w, address[lane], lane);
      shared_write(e, w, (u32)address[lane], 16, lane, (u8 *)rows[r]);
    }
  }
}

/* ---- how the lanes of a warp hold a matrix; group and pair are the lane's number by four and within four ---- */

void read_left(const Emulator *e, const Warp *w, const Operand *o, ElementType type, Left left) {
  Lanes scratch;
  for (int r = 0; r < 4; r++) {
    const u64 *values = source(e, w, &o[r], scratch);
    for (int lane = 0; lane < LANES; lane++) {
      int group = lane / 4, pair = lane % 4, row = group + 8 * (r & 1);
      if (type == TF32) {
        left[row][pair + 4 * (r >> 1)] = from_tf32((u32)values[lane]);
      } else {
        for (int half = 0; half < 2; half++)
          left[row][2 * pair + 8 * (r >> 1) + half] = element((u16)(values[lane] >> 16 * half), type);
      }
    }
  }
}

static void read_right(const Emulator *e, const Warp *w, const Operand *o, ElementType type, Right right) {
  Lanes scratch;
  for (int r = 0; r < 2; r++) {
    const u64 *values = source(e, w, &o[r], scratch);
    for (int lane = 0; lane < LANES; lane++) {
      int group = lane / 4, pair = lane % 4;
      if (type == TF32) {
        right[group][pair + 4 * r] = from_tf32((u32)values[lane]);
      } else {
        for (int half = 0; half < 2; half++)
          right[group][2 * pair + 8 * r + half] = element((u16)(values[lane] >> 16 * half), type);
      }
    }
  }
}

void read_sums(const Emulator *e, const Warp *w, const Operand *o, int count, Sums sums) {
  Lanes scratch;
  for (int r = 0; r < count; r++) {
    const u64 *values = source(e, w, &o[r], scratch);
    for (int lane = 0; lane < LANES; lane++)
      sums[lane / 4 + 8 * (r >> 1 & 1)][8 * (r >> 2) + 2 * (lane % 4) + (r & 1)] = float_of((u32)values[lane]);
  }
}

void write_sums(Warp *w, const Operand *o, int count, Sums sums) {
  for (int r = 0; r < count; r++) {
    Lanes values;
    for (int lane = 0; lane < LANES; lane++)
      values[lane] = bits_of((f32)sums[lane / 4 + 8 * (r >> 1 & 1)][8 * (r >> 2) + 2 * (lane % 4) + (r & 1)]);
    write_lanes(w, &o[r], values, ~0u);
  }
}

void add_product(Sums sums, Left left, Right right, int columns, int depth) {
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < columns; column++) {
      f64 sum = 0;
      for (int k = 0; k < depth; k++) sum += (f64)left[row][k] * right[column][k];
      sums[row][column] += sum;
    }
}

static void multiply(Emulator *e, Warp *w, const Operand *o, ElementType type, int depth) {
  static _Thread_local Left left;
  static _Thread_local Right right;
  static _Thread_local Sums sums;
  read_left(e, w, &o[4], type, left);
  read_right(e, w, &o[8], type, right);
  read_sums(e, w, &o[10], 4, sums);
  add_product(sums, left, right, 8, depth);
  write_sums(w, &o[0], 4, sums);
}

/* m16n8k16; detail: the element type. Operands: four of the result, four of the left matrix, two of the right one, four sums. */
void multiply_16_bits(Emulator *e, Warp *w, const Instruction *i, const Operand *o) { multiply(e, w, o, i->detail[0], 16); }

/* m16n8k8 */
void multiply_tf32(Emulator *e, Warp *w, const Operand *o) { multiply(e, w, o, TF32, 8); }
