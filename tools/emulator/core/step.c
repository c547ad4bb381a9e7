/* One instruction of one warp. */
#include "emulator.h"

#include <stdlib.h>

/* ---- how lanes of 64 bits hold the types of lanewise.def ---- */

#define GET_pred(x) ((x) != 0)
#define GET_u8(x) ((u8)(x))
#define GET_s8(x) ((s8)(x))
#define GET_u16(x) ((u16)(x))
#define GET_s16(x) ((s16)(x))
#define GET_u32(x) ((u32)(x))
#define GET_s32(x) ((s32)(x))
#define GET_u64(x) (x)
#define GET_s64(x) ((s64)(x))
#define GET_f32(x) float_of((u32)(x))
#define GET_f64(x) double_of(x)
#define PUT_pred(x) ((u64)((x) != 0))
#define PUT_u16(x) ((u64)(u16)(x))
#define PUT_s16(x) ((u64)(u16)(x))
#define PUT_u32(x) ((u64)(u32)(x))
#define PUT_s32(x) ((u64)(u32)(x))
#define PUT_u64(x) ((u64)(x))
#define PUT_s64(x) ((u64)(x))
#define PUT_f32(x) ((u64)bits_of(x))
#define PUT_f64(x) bits_of_double(x)

#define UNARY(NAME, OPCODES, R, A, EXPRESSION)                 \
  case NAME: {                                                 \
    const u64 *x = source(e, w, &o[1], scratch[0]);            \
    for (int lane = 0; lane < LANES; lane++) {                 \
      A a = GET_##A(x[lane]);                                  \
      result[lane] = PUT_##R(EXPRESSION);                      \
    }                                                          \
    break;                                                     \
  }
#define BINARY(NAME, OPCODES, R, A, B, EXPRESSION)             \
  case NAME: {                                                 \
    const u64 *x = source(e, w, &o[1], scratch[0]);            \
    const u64 *y = source(e, w, &o[2], scratch[1]);            \
    for (int lane = 0; lane < LANES; lane++) {                 \
      A a = GET_##A(x[lane]);                                  \
      B b = GET_##B(y[lane]);                                  \
      result[lane] = PUT_##R(EXPRESSION);                      \
    }                                                          \
    break;                                                     \
  }
#define TERNARY(NAME, OPCODES, R, A, B, C, EXPRESSION)         \
  case NAME: {                                                 \
    const u64 *x = source(e, w, &o[1], scratch[0]);            \
    const u64 *y = source(e, w, &o[2], scratch[1]);            \
    const u64 *z = source(e, w, &o[3], scratch[2]);            \
    for (int lane = 0; lane < LANES; lane++) {                 \
      A a = GET_##A(x[lane]);                                  \
      B b = GET_##B(y[lane]);                                  \
      C c = GET_##C(z[lane]);                                  \
      result[lane] = PUT_##R(EXPRESSION);                      \
    }                                                          \
    break;                                                     \
  }
#define QUATERNARY(NAME, OPCODES, R, A, B, C, D, EXPRESSION)   \
  case NAME: {                                                 \
    const u64 *x = source(e, w, &o[1], scratch[0]);            \
    const u64 *y = source(e, w, &o[2], scratch[1]);            \
    const u64 *z = source(e, w, &o[3], scratch[2]);            \
    const u64 *v = source(e, w, &o[4], scratch[3]);            \
    for (int lane = 0; lane < LANES; lane++) {                 \
      A a = GET_##A(x[lane]);                                  \
      B b = GET_##B(y[lane]);                                  \
      C c = GET_##C(z[lane]);                                  \
      D d = GET_##D(v[lane]);                                  \
      result[lane] = PUT_##R(EXPRESSION);                      \
    }                                                          \
    break;                                                     \
  }

static void lanewise(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  Lanes scratch[4], result;
  switch (i->operation) {
#include "lanewise.def"
  }
  write_lanes(w, &o[0], result, active);
}

/* ---- setp, shfl, redux and unpacking ---- */

/* The order is that of decode.py. */
enum { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, IS_NAN };
enum { S16, U16, S32, U32, S64, U64, F32, F64 };

/* From the order of two numbers, -1, 0 or 1, or 2 if one of them is NaN. */
static int compare(int comparison, int order) {
  if (order == 2) return comparison >= EQU && comparison != NUM;
  switch (comparison) {
    case EQ: case EQU: return order == 0;
    case NE: case NEU: return order != 0;
    case LT: case LTU: return order < 0;
    case LE: case LEU: return order <= 0;
    case GT: case GTU: return order > 0;
    case GE: case GEU: return order >= 0;
    default: return comparison == NUM;
  }
}

#define ORDER(TYPE)                                   \
  {                                                   \
    TYPE x = GET_##TYPE(a), y = GET_##TYPE(b);        \
    return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;   \
  }

static int order_of(int type, u64 a, u64 b) {
  switch (type) {
    case S16: ORDER(s16)
    case U16: ORDER(u16)
    case S32: ORDER(s32)
    case U32: ORDER(u32)
    case S64: ORDER(s64)
    case U64: ORDER(u64)
    case F32: ORDER(f32)
    default: ORDER(f64)
  }
}

/* detail: comparison, type, what combines it with a predicate (0: nothing, and, or, xor). With two results, the second has the
   opposite of the comparison. */
static void set_predicate(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  Lanes scratch[3], result, opposite;
  const Operand *sources = o + i->results;
  const u64 *a = source(e, w, &sources[0], scratch[0]), *b = source(e, w, &sources[1], scratch[1]);
  const u64 *c = i->detail[2] ? source(e, w, &sources[2], scratch[2]) : NULL;
  for (int lane = 0; lane < LANES; lane++) {
    result[lane] = compare(i->detail[0], order_of(i->detail[1], a[lane], b[lane]));
    opposite[lane] = !result[lane];
    for (int which = 0; c && which < 2; which++) {
      u64 *p = which ? &opposite[lane] : &result[lane];
      *p = i->detail[2] == 1 ? *p & c[lane] : i->detail[2] == 2 ? *p | c[lane] : *p ^ c[lane];
    }
  }
  write_lanes(w, &o[0], result, active);
  if (i->results == 2) write_lanes(w, &o[1], opposite, active);
}

/* detail: mode (idx, bfly, up, down). Operands: result, [whether in range,] value, lane or distance, clamp and segment,
   members. */
static void shuffle(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  Lanes scratch[3], result, in_range;
  const Operand *sources = o + i->results;
  const u64 *a = source(e, w, &sources[0], scratch[0]), *b = source(e, w, &sources[1], scratch[1]);
  const u64 *c = source(e, w, &sources[2], scratch[2]);
  for (int lane = 0; lane < LANES; lane++) {
    int segment = c[lane] >> 8 & 31, clamp = c[lane] & 31, distance = b[lane] & 31;
    int first = lane & segment, last = first | (clamp & ~segment), from;
    switch (i->detail[0]) {
      case 0: from = first | (distance & ~segment); break;
      case 1: from = lane ^ distance; break;
      case 2: from = lane - distance; break;
      default: from = lane + distance;
    }
    in_range[lane] = i->detail[0] == 2 ? from >= last : from <= last;
    if (!in_range[lane]) from = lane;
    if ((active >> lane & 1) && !(active >> from & 1)) report(e, w, ABSENT_LANE, lane, from, -1, -1);
    result[lane] = a[from];
  }
  write_lanes(w, &o[0], result, active);
  if (i->results == 2) write_lanes(w, &o[1], in_range, active);
}

/* detail: operation (add, min, max, and, or, xor), whether signed. Operands: result, value, members. */
static void reduce(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  Lanes scratch, result;
  const u64 *values = source(e, w, &o[1], scratch);
  u32 members = (u32)uniform(e, w, &o[2]) & active, total = 0;
  int any = 0;
  for (int lane = 0; lane < LANES; lane++) {
    if (!(members >> lane & 1)) continue;
    u32 value = (u32)values[lane];
    int is_less = i->detail[1] ? (s32)value < (s32)total : value < total;
    if (!any++) {
      total = value;
      continue;
    }
    switch (i->detail[0]) {
      case 0: total += value; break;
      case 1: total = is_less ? value : total; break;
      case 2: total = is_less ? total : value; break;
      case 3: total &= value; break;
      case 4: total |= value; break;
      default: total ^= value;
    }
  }
  for (int lane = 0; lane < LANES; lane++) result[lane] = total;
  write_lanes(w, &o[0], result, active);
}

/* detail: bits of each half. Operands: low half, high half, value. */
static void unpack(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  Lanes scratch, low, high;
  const u64 *values = source(e, w, &o[2], scratch);
  for (int lane = 0; lane < LANES; lane++) {
    low[lane] = values[lane] & (((u64)1 << i->detail[0]) - 1);
    high[lane] = values[lane] >> i->detail[0];
  }
  write_lanes(w, &o[0], low, active);
  write_lanes(w, &o[1], high, active);
}

/* ---- loads and stores ---- */

enum { IN_GLOBAL, IN_SHARED, IN_PARAMETERS };
static const u64 POISON = 0xdeadbeefdeadbeef;

/* detail: space, elements, bytes of each, bits of the register that a signed element is extended to (0: unsigned).
   Operands: results, address. */
static void load(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  int space = i->detail[0], count = i->detail[1], bytes = i->detail[2], size = count * bytes;
  Lanes address, values[8];
  addresses(e, w, &o[count], address);
  for (int lane = 0; lane < LANES; lane++) {
    if (!(active >> lane & 1)) continue;
    const u8 *from;
    if (space != IN_PARAMETERS && address[lane] % size) report(e, w, MISALIGNED, lane, address[lane], -1, -1);
    switch (space) {
      case IN_GLOBAL: from = global_bytes(e, w, address[lane], size, lane, 0); break;
      case IN_SHARED: from = shared_read(e, w, (u32)address[lane], size, lane); break;
      default: from = e->parameters + address[lane];
    }
    for (int k = 0; k < count; k++) {
      u64 value = from ? 0 : POISON >> (64 - 8 * bytes);
      if (from) memcpy(&value, from + k * bytes, bytes);
      if (i->detail[3]) {
        s64 extended = (s64)(value << (64 - 8 * bytes)) >> (64 - 8 * bytes);
        value = (u64)extended << (64 - i->detail[3]) >> (64 - i->detail[3]);
      }
      values[k][lane] = value;
    }
  }
  for (int k = 0; k < count; k++) write_lanes(w, &o[k], values[k], active);
}

/* detail: space, elements, bytes of each. Operands: address, values. */
static void store(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  int space = i->detail[0], count = i->detail[1], bytes = i->detail[2], size = count * bytes;
  Lanes address, scratch;
  u8 data[LANES][64];
  addresses(e, w, &o[0], address);
  for (int k = 0; k < count; k++) {
    const u64 *values = source(e, w, &o[1 + k], scratch);
    for (int lane = 0; lane < LANES; lane++) memcpy(data[lane] + k * bytes, &values[lane], bytes);
  }
  check_lanes_agree(e, w, address, active, size, sizeof data[0], data[0]);
  for (int lane = 0; lane < LANES; lane++) {
    if (!(active >> lane & 1)) continue;
    if (address[lane] % size) report(e, w, MISALIGNED, lane, address[lane], -1, -1);
    if (space == IN_SHARED) {
      shared_write(e, w, (u32)address[lane], size, lane, data[lane]);
    } else {
      u8 *to = global_bytes(e, w, address[lane], size, lane, 1);
      if (to) memcpy(to, data[lane], size);
    }
  }
}

/* Operands: shared address, global address, size, [bytes that are copied]. */
static void copy_async(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  Lanes to, from, scratch;
  u32 size = (u32)o[2].value;
  addresses(e, w, &o[0], to);
  addresses(e, w, &o[1], from);
  const u64 *copied = source(e, w, i->operand_count > 3 ? &o[3] : &o[2], scratch);
  for (int lane = 0; lane < LANES; lane++) {
    if (!(active >> lane & 1)) continue;
    u32 bytes = (u32)copied[lane];
    if (bytes > size) {
      report(e, w, COPY_SIZE, lane, bytes, -1, -1);
      bytes = size;
    }
    if ((u32)to[lane] % size) report(e, w, MISALIGNED, lane, (u32)to[lane], -1, -1);
    if (from[lane] % size) report(e, w, MISALIGNED, lane, from[lane], -1, -1);
    start_copy(e, w, (u32)to[lane], from[lane], size, bytes, lane);
  }
}

/* A fence shows the matrix units all that the warp has seen; what it writes from now on is another time. */
static void proxy_fence(Warp *w) {
  memcpy(w->fenced, w->seen, sizeof w->seen);
  w->seen[w->id]++;
}

/* ---- control ---- */

static u32 active_lanes(const Warp *w, const Instruction *i) {
  if (i->guard < 0) return ~0u;
  u32 active = 0;
  for (int lane = 0; lane < LANES; lane++) active |= (u32)(w->registers[i->guard][lane] != (u64)i->guard_negated) << lane;
  return active;
}

/* Whether an instruction that the whole warp executes together has all its lanes. */
static void need_all_lanes(Emulator *e, const Warp *w, u32 active) {
  if (active != ~0u) report(e, w, INACTIVE_LANES, 0, active, -1, -1);
}

static Outcome leave(Emulator *e, Warp *w, const Instruction *i, u32 active) {
  if (active != ~0u) {
    report(e, w, DIVERGENT, 0, active, -1, -1);
    return STUCK;
  }
  if (i->operation == RETURN) return AT_EXIT;
  w->pc = i->target;
  return JUMPED;
}

static Outcome execute(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active) {
  switch (i->operation) {
    case NOTHING: break;
    case BRANCH: case RETURN: return leave(e, w, i, active);
    case BARRIER:
      need_all_lanes(e, w, active);
      w->barrier = (s32)uniform(e, w, &o[0]);
      w->barrier_threads = i->operand_count > 1 ? (s32)uniform(e, w, &o[1]) : 0;
      return AT_BARRIER;
    case UNPACK: unpack(e, w, i, o, active); break;
    case SET_PREDICATE: set_predicate(e, w, i, o, active); break;
    case SHUFFLE: shuffle(e, w, i, o, active); break;
    case REDUCE: reduce(e, w, i, o, active); break;
    case LOAD: load(e, w, i, o, active); break;
    case STORE: store(e, w, i, o, active); break;
    case COPY_ASYNC: copy_async(e, w, i, o, active); break;
    case COPY_COMMIT: commit_copies(w); break;
    case COPY_WAIT: deliver_copies(e, w, (s32)uniform(e, w, &o[0])); break;
    case PROXY_FENCE: proxy_fence(w); break;
    case LOAD_MATRICES: need_all_lanes(e, w, active); load_matrices(e, w, i, o, active); break;
    case STORE_MATRICES: need_all_lanes(e, w, active); store_matrices(e, w, i, o); break;
    case MMA_16_BITS: need_all_lanes(e, w, active); multiply_16_bits(e, w, i, o); break;
    case MMA_TF32: need_all_lanes(e, w, active); multiply_tf32(e, w, o); break;
    case WGMMA: need_all_lanes(e, w, active); wgmma(e, w, i, o); break;
    case WGMMA_FENCE: wgmma_fence(w); break;
    case WGMMA_COMMIT: wgmma_commit(w); break;
    case WGMMA_WAIT: wgmma_wait(w, (s32)uniform(e, w, &o[0])); break;
    default: lanewise(e, w, i, o, active);
  }
  return NEXT;
}

Outcome step(Emulator *e, Warp *w) {
  const Instruction *i = &e->instructions[w->pc];
  const Operand *o = &e->operands[i->operands];
  u32 active = active_lanes(w, i);
  Outcome outcome = NEXT;
  w->executed++;
  if (active) {
    Lanes before;
    s32 fed = w->accumulating ? check_registers(e, w, i, o) : -1;
    if (fed >= 0) memcpy(before, w->registers[fed], sizeof before);
    outcome = execute(e, w, i, o, active);
    if (fed >= 0 && memcmp(before, w->registers[fed], sizeof before)) report(e, w, IN_FLIGHT, 0, fed, -1, -1);
  }
  if (outcome == NEXT || outcome == AT_BARRIER) w->pc++;
  return outcome;
}
