/* Reading and writing an instruction's operands. */
#include "emulator.h"

static u64 special(const Emulator *e, const Warp *w, int which, int lane) {
  switch (which) {
    case TID: return w->id * LANES + lane;
    case NTID: return e->warp_count * LANES;
    case CTAID_X: case CTAID_Y: case CTAID_Z: return e->program[which - CTAID_X];
    case NCTAID_X: case NCTAID_Y: case NCTAID_Z: return e->grid[which - NCTAID_X];
    case LANEID: return lane;
    default: return 0;
  }
}

const u64 *source(const Emulator *e, const Warp *w, const Operand *operand, u64 *scratch) {
  switch (operand->kind) {
    case REGISTER: return w->registers[operand->index];
    case NEGATED:
      for (int lane = 0; lane < LANES; lane++) scratch[lane] = !w->registers[operand->index][lane];
      break;
    case SPECIAL:
      for (int lane = 0; lane < LANES; lane++) scratch[lane] = special(e, w, operand->index, lane);
      break;
    default:
      for (int lane = 0; lane < LANES; lane++) scratch[lane] = operand->value;
  }
  return scratch;
}

u64 uniform(const Emulator *e, const Warp *w, const Operand *operand) {
  Lanes scratch;
  return source(e, w, operand, scratch)[0];
}

void addresses(const Emulator *e, const Warp *w, const Operand *operand, u64 *result) {
  const u64 *base = source(e, w, operand, result);
  u64 offset = operand->kind == REGISTER ? operand->value : 0;
  for (int lane = 0; lane < LANES; lane++) result[lane] = base[lane] + offset;
}

void write_lanes(Warp *w, const Operand *operand, const u64 *lanes, u32 active) {
  if (operand->kind == SINK) return;
  u64 *target = w->registers[operand->index];
  if (active == ~0u) {
    memcpy(target, lanes, sizeof(Lanes));
    return;
  }
  for (int lane = 0; lane < LANES; lane++)
    if (active >> lane & 1) target[lane] = lanes[lane];
}
