/* Types that all parts of the emulator share: decoded instructions, warps, a program's memory, and findings.

   A program (a thread block) has warps of 32 lanes that execute each instruction together. Registers hold 32 lanes of 64 bits,
   narrower values extended with zeros. One program runs at a time, one warp at a time.

   Who has seen what: every warp counts its own time, a clock that moves on at barriers and fences. There is a second clock for
   what each warp's matrix unit reads on its own (wgmma). A warp keeps, for every clock, up to when it has seen what was done
   under it; an access that it has not seen races with its own. Clocks go on from program to program, so that nothing that was
   noted under them needs to be wiped. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include "numbers.h"

enum { LANES = 32, MAX_WARPS = 32, MAX_CLOCKS = 2 * MAX_WARPS, MAX_FINDINGS = 256 };

/* ---- decoded PTX; decode.py has the same structures ---- */

typedef enum { REGISTER, NEGATED, IMMEDIATE, SPECIAL, SINK } OperandKind;
typedef enum { TID, NTID, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANEID, ZERO } Special;

typedef struct {
  s32 kind;
  s32 index; /* of a register, or which special one */
  u64 value; /* an immediate; of an address, what is added to the register */
} Operand;

#define UNARY(NAME, ...) NAME,
#define BINARY(NAME, ...) NAME,
#define TERNARY(NAME, ...) NAME,
#define QUATERNARY(NAME, ...) NAME,
#define OPERATION(NAME) NAME,
typedef enum {
#include "lanewise.def"
#include "operations.def"
} Operation;
#undef UNARY
#undef BINARY
#undef TERNARY
#undef QUATERNARY
#undef OPERATION

typedef struct {
  s32 operation;
  s32 guard, guard_negated; /* the predicate register that says which lanes execute it; -1: all */
  s32 operands, operand_count;
  s32 results; /* so many operands, the first ones, are written */
  s32 target;  /* of a branch */
  s32 detail[4];
} Instruction;

/* ---- what is found ---- */

#define FINDING(NAME, TEXT) NAME,
#define NOTE(NAME, TEXT) NAME,
typedef enum {
#include "findings.def"
} Kind;
#undef FINDING
#undef NOTE

typedef struct {
  s32 kind, instruction, program, warp, lane;
  s32 other, other_instruction; /* the warp (or program) and instruction that it clashes with; -1: none */
  u64 address, count;           /* count: of the instruction, in all warps */
  u64 last;                     /* when it was found last, by the warp's count of instructions */
} Finding;

/* ---- state ---- */

typedef u64 Lanes[LANES];
typedef enum { RUNNING, WAITING, DONE } WarpState;
typedef enum { NEXT, JUMPED, AT_BARRIER, AT_EXIT, STUCK } Outcome;

typedef struct {
  u32 first, size, copied; /* bytes of shared memory, of which so many are copied and the rest zeros */
  const u8 *from;
  s32 group; /* -1: not committed */
  s32 instruction;
} Copy;

typedef struct {
  s32 id, pc, state;
  s32 barrier, barrier_threads; /* that it waits at; 0 threads: all of the program */
  Lanes *registers;
  u32 seen[MAX_CLOCKS];   /* of each clock, up to when */
  u32 fenced[MAX_CLOCKS]; /* what of it a proxy fence has shown to the matrix units */
  Copy *copies;           /* of cp.async, not delivered yet */
  s32 copy_count, copy_room, copy_groups;
  u32 groups_committed, groups_done; /* of wgmma; the one under way is groups_committed + 1, and so the matrix unit's clock */
  u32 *accumulating, *feeding; /* of each register: the last wgmma group that writes it, or reads it */
  u64 *written_at;             /* of each register: when another instruction wrote it last, in instructions */
  u64 fence_at, executed;
} Warp;

typedef struct {
  u32 clock;
  s32 instruction;
} Access;

typedef struct {
  u64 base, size;
  u32 *writer, *reader; /* of each byte: 1 + the program; SEVERAL */
} Buffer;

typedef struct {
  const Instruction *instructions;
  const Operand *operands;
  s32 instruction_count, register_count, warp_count;
  const u8 *parameters;
  s32 grid[3], program[3], program_id;
  Warp warps[MAX_WARPS];

  u8 *shared; /* memory of the program; its bytes have addresses from shared_base on */
  u32 shared_base, shared_size;
  u8 *byte_state, *byte_writer;
  Access *byte_write;
  Access *byte_read[MAX_CLOCKS];

  Buffer *buffers;
  s32 buffer_count, last_buffer;

  u64 random;
  u64 instruction_limit, executed;
  Finding findings[MAX_FINDINGS];
  s32 finding_count;
} Emulator;

void report(Emulator *e, const Warp *w, Kind kind, int lane, u64 address, int other, int other_instruction);

/* ---- operands (operands.c) ---- */

/* The lanes of a source operand; scratch holds them if they are in no register. */
const u64 *source(const Emulator *e, const Warp *w, const Operand *operand, u64 *scratch);
/* An operand that is the same in all lanes. */
u64 uniform(const Emulator *e, const Warp *w, const Operand *operand);
void addresses(const Emulator *e, const Warp *w, const Operand *operand, u64 *result);
void write_lanes(Warp *w, const Operand *operand, const u64 *lanes, u32 active);

/* ---- memory: pointers to the bytes, or NULL if they may not be touched ---- */

u8 *global_bytes(Emulator *e, const Warp *w, u64 address, u32 size, int lane, int is_write);
u8 *shared_read(Emulator *e, const Warp *w, u32 address, u32 size, int lane);
u8 *shared_matrix_read(Emulator *e, const Warp *w, u32 address, u32 size, int lane);
void shared_write(Emulator *e, const Warp *w, u32 address, u32 size, int lane, const u8 *data);
void check_lanes_agree(Emulator *e, const Warp *w, const u64 *address, u32 active, u32 size, u32 step, const u8 *data);
void start_copy(Emulator *e, Warp *w, u32 destination, u64 from, u32 size, u32 copied, int lane);
void commit_copies(Warp *w);
void deliver_copies(Emulator *e, Warp *w, s32 groups_left);
void forget_shared(Emulator *e);

/* ---- matrices ---- */

void load_matrices(Emulator *e, Warp *w, const Instruction *i, const Operand *o, u32 active);
void store_matrices(Emulator *e, Warp *w, const Instruction *i, const Operand *o);
void multiply_16_bits(Emulator *e, Warp *w, const Instruction *i, const Operand *o);
void multiply_tf32(Emulator *e, Warp *w, const Operand *o);
void wgmma(Emulator *e, Warp *w, const Instruction *i, const Operand *o);
void wgmma_fence(Warp *w);
void wgmma_commit(Warp *w);
void wgmma_wait(Warp *w, s32 groups_left);
s32 check_registers(Emulator *e, Warp *w, const Instruction *i, const Operand *o);

/* ---- one instruction of a warp (step.c) ---- */

Outcome step(Emulator *e, Warp *w);

#endif
