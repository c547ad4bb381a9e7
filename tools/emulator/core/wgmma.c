/* wgmma: products of four warps, with operands in shared memory that are read until the wait.

   The result is computed at once. That it is not there before the wait, and that operands must not change until then, is checked
   instead: shared memory by the clock of the warp's matrix unit, registers by the group that uses them. Each warp is on its
   own. */
#include "matrix.h"

/* The fields of a matrix descriptor (PTX ISA, "matrix descriptor format"). */
typedef struct {
  u32 start, leading, stride; /* bytes */
  u32 span;                   /* bytes of a row of the swizzle pattern; 16: none */
} Descriptor;

static Descriptor read_descriptor(Emulator *e, const Warp *w, const Operand *operand) {
  static const u32 spans[] = {16, 128, 64, 32};
  Lanes scratch;
  const u64 *lanes = source(e, w, operand, scratch);
  u64 bits = lanes[0];
  for (int lane = 1; lane < LANES; lane++)
    if (lanes[lane] != bits) report(e, w, DESCRIPTOR, lane, lanes[lane], -1, -1);
  if (bits >> 49 & 7) report(e, w, DESCRIPTOR, 0, bits, -1, -1); /* a pattern that starts at no multiple of its size */
  return (Descriptor){(bits & 0x3fff) << 4, (bits >> 16 & 0x3fff) << 4, (bits >> 32 & 0x3fff) << 4, spans[bits >> 62]};
}

/* Where 16 bytes of a matrix lie. line: which of them across the contiguous direction, chunk: along it.

   is_summed_major: rows of the matrix are contiguous ("K-major"): line is the row, chunk two of the summed direction. Otherwise
   its columns are: line is the place in the summed direction, chunk counts rows by eight. */
static u32 chunk_address(Descriptor d, int is_summed_major, u32 line, u32 chunk) {
  u32 offset = line % 8 * d.span;
  if (d.span == 16)
    offset += is_summed_major ? line / 8 * d.stride + chunk * d.leading : line / 8 * d.leading + chunk * d.stride;
  else
    offset += line / 8 * d.stride + chunk % (d.span / 16) * 16 + chunk / (d.span / 16) * d.leading;
  u32 address = d.start + offset;
  return address ^ (address >> 3 & (d.span - 16)); /* bits 4 to 6, as far as the span has them, by bits 7 to 9 */
}

static void spread(const u8 *bytes, ElementType type, f32 *target, int step) {
  int count = type == TF32 ? 4 : 8;
  for (int i = 0; i < count; i++) {
    u32 word = 0;
    memcpy(&word, bytes + i * (16 / count), 16 / count);
    target[i * step] = type == TF32 ? from_tf32(word) : element((u16)word, type);
  }
}

/* Rows first, first + 1, ... of an operand in shared memory, 32 bytes of each in the summed direction. */
static void read_shared(Emulator *e, const Warp *w, const Operand *descriptor, int is_transposed, ElementType type, int first,
                        int rows, f32 (*target)[16]) {
  Descriptor d = read_descriptor(e, w, descriptor);
  int depth = type == TF32 ? 8 : 16;
  int lines = is_transposed ? depth : rows, chunks = is_transposed ? rows / 8 : 2;
  for (int line = 0; line < lines; line++)
    for (int chunk = 0; chunk < chunks; chunk++) {
      u32 address = is_transposed ? chunk_address(d, 0, line, first / 8 + chunk) : chunk_address(d, 1, first + line, chunk);
      const u8 *bytes = shared_matrix_read(e, w, address, 16, line % LANES);
      static const u8 zeros[16];
      if (is_transposed)
        spread(bytes ? bytes : zeros, type, &target[8 * chunk][line], 16);
      else
        spread(bytes ? bytes : zeros, type, &target[line][chunk * depth / 2], 1);
    }
}

/* m64nNk16 (k8 for TF32); detail: N, element type, whether the left matrix is in registers. Operands: N / 2 sums, the left matrix
   (four registers or a descriptor), the right one's descriptor, whether the sums are added to, signs of both matrices, and whether
   they are transposed (of 16-bit ones, and of a left one in shared memory). */
void wgmma(Emulator *e, Warp *w, const Instruction *i, const Operand *o) {
  static _Thread_local Left left;
  static _Thread_local Right right;
  static _Thread_local Sums sums;
  int columns = i->detail[0], in_registers = i->detail[2], count = columns / 2, depth = i->detail[1] == TF32 ? 8 : 16;
  ElementType type = i->detail[1];
  const Operand *a = o + count, *b = a + (in_registers ? 4 : 1), *adds = b + 1, *transposed = adds + 3;
  int left_transposed = 0, right_transposed = 0;
  if (type != TF32 && !in_registers) left_transposed = (int)transposed++->value;
  if (type != TF32) right_transposed = (int)transposed->value;

  if (in_registers)
    read_left(e, w, a, type, left);
  else
    read_shared(e, w, a, left_transposed, type, w->id % 4 * 16, 16, left);
  read_shared(e, w, b, right_transposed, type, 0, columns, right);
  if (uniform(e, w, adds))
    read_sums(e, w, o, count, sums);
  else
    memset(sums, 0, sizeof sums);
  if ((s64)adds[1].value * (s64)adds[2].value < 0)
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < depth; k++) left[row][k] = -left[row][k];
  add_product(sums, left, right, columns, depth);
  write_sums(w, o, count, sums);

  u32 group = w->groups_committed + 1;
  for (int r = 0; r < count; r++) w->accumulating[o[r].index] = group;
  for (int r = 0; in_registers && r < 4; r++)
    if (a[r].kind == REGISTER) w->feeding[a[r].index] = group;
}

void wgmma_fence(Warp *w) { w->fence_at = w->executed; }

void wgmma_commit(Warp *w) { w->groups_committed++; }

void wgmma_wait(Warp *w, s32 groups_left) {
  s64 done = (s64)w->groups_committed - groups_left;
  if (done > w->groups_done) w->groups_done = (u32)done;
  w->seen[MAX_WARPS + w->id] = w->groups_done;
}

/* ---- registers of a wgmma in flight ---- */

static int is_register(const Operand *o) { return o->kind == REGISTER || o->kind == NEGATED; }

/* The sums and the left matrix of a wgmma: another one under way may share the sums, nothing else; and what other instructions
   wrote should be written before the fence (ptxas adds what is missing, and serialises the products). */
static void check_own_registers(Emulator *e, Warp *w, const Instruction *i, const Operand *o) {
  int count = i->detail[0] / 2, in_registers = i->detail[2] ? 4 : 0;
  int adds = uniform(e, w, o + count + (in_registers ? 4 : 1) + 1) != 0;
  for (int r = 0; r < count + in_registers; r++) {
    if (!is_register(&o[r])) continue;
    s32 index = o[r].index;
    if (r < count ? w->feeding[index] > w->groups_done : w->accumulating[index] > w->groups_done)
      report(e, w, IN_FLIGHT, 0, index, -1, -1);
    if ((r >= count || adds) && w->written_at[index] > w->fence_at) report(e, w, LATE_REGISTER, 0, index, -1, -1);
  }
}

/* Reports an instruction that uses sums of a wgmma in flight. Returns a register that it writes although one reads it, or -1:
   that is an error if its value changes. */
s32 check_registers(Emulator *e, Warp *w, const Instruction *i, const Operand *o) {
  if (i->operation == WGMMA) {
    check_own_registers(e, w, i, o);
    return -1;
  }
  s32 feeding = -1;
  for (int k = 0; k < i->operand_count; k++) {
    if (!is_register(&o[k])) continue;
    if (w->accumulating[o[k].index] > w->groups_done) report(e, w, IN_FLIGHT, 0, o[k].index, -1, -1);
    if (k < i->results && w->feeding[o[k].index] > w->groups_done) feeding = o[k].index;
    if (k < i->results) w->written_at[o[k].index] = w->executed;
  }
  return feeding;
}
