/* A launch: its programs one after the other; of each, warps that take turns in an order drawn from a seed. */
#include "emulator.h"

#include <stdlib.h>

/* Keeps the first finding of each kind for each instruction, and how often a warp executed it and found the same. */
void report(Emulator *e, const Warp *w, Kind kind, int lane, u64 address, int other, int other_instruction) {
  u64 now = w->executed * MAX_WARPS + w->id;
  for (int i = 0; i < e->finding_count; i++) {
    Finding *f = &e->findings[i];
    if (f->kind != (s32)kind || f->instruction != w->pc) continue;
    f->count += f->last != now;
    f->last = now;
    return;
  }
  if (e->finding_count < MAX_FINDINGS)
    e->findings[e->finding_count++] =
        (Finding){kind, w->pc, e->program_id, w->id, lane, other, other_instruction, address, 1, now};
}

/* ---- turns ---- */

static u32 draw(Emulator *e, u32 below) { /* xorshift */
  e->random ^= e->random << 13;
  e->random ^= e->random >> 7;
  e->random ^= e->random << 17;
  return (u32)((e->random >> 32) * below >> 32);
}

static int count_in(const Emulator *e, WarpState state) {
  int count = 0;
  for (int i = 0; i < e->warp_count; i++) count += e->warps[i].state == (s32)state;
  return count;
}

static Warp *drawn_running(Emulator *e) {
  int chosen = draw(e, count_in(e, RUNNING));
  for (int i = 0;; i++)
    if (e->warps[i].state == RUNNING && chosen-- == 0) return &e->warps[i];
}

/* Some instructions of a warp. Returns whether it can go on, now or after a barrier, or has come to its end. */
static int take_turn(Emulator *e, Warp *w) {
  for (u32 left = 1 + draw(e, 1000); left && w->state == RUNNING; left--) {
    if (w->pc >= e->instruction_count) {
      w->state = DONE;
      return 1;
    }
    switch (step(e, w)) {
      case AT_BARRIER: w->state = WAITING; break;
      case AT_EXIT: w->state = DONE; break;
      case STUCK: return 0;
      default: break;
    }
    if (++e->executed > e->instruction_limit) {
      report(e, w, INSTRUCTION_LIMIT, 0, 0, -1, -1);
      return 0;
    }
  }
  return 1;
}

/* ---- barriers: who passes has seen what any of the others had ---- */

static void merge(u32 *into, const u32 *from) {
  for (int clock = 0; clock < MAX_CLOCKS; clock++)
    if (from[clock] > into[clock]) into[clock] = from[clock];
}

static void open_barrier(Emulator *e, s32 barrier) {
  u32 seen[MAX_CLOCKS] = {0}, fenced[MAX_CLOCKS] = {0};
  for (int i = 0; i < e->warp_count; i++) {
    Warp *w = &e->warps[i];
    if (w->state != WAITING || w->barrier != barrier) continue;
    merge(seen, w->seen);
    merge(fenced, w->fenced);
  }
  for (int i = 0; i < e->warp_count; i++) {
    Warp *w = &e->warps[i];
    if (w->state != WAITING || w->barrier != barrier) continue;
    memcpy(w->seen, seen, sizeof seen);
    memcpy(w->fenced, fenced, sizeof fenced);
    w->seen[w->id]++;
    w->state = RUNNING;
  }
}

/* Opens a barrier at which all have arrived; returns whether there is one. Warps that have ended count as arrived. */
static int open_any_barrier(Emulator *e) {
  for (int i = 0; i < e->warp_count; i++) {
    const Warp *w = &e->warps[i];
    if (w->state != WAITING) continue;
    int arrived = 0, expected = w->barrier_threads ? w->barrier_threads / LANES : e->warp_count - count_in(e, DONE);
    for (int k = 0; k < e->warp_count; k++) arrived += e->warps[k].state == WAITING && e->warps[k].barrier == w->barrier;
    if (arrived == expected) {
      open_barrier(e, w->barrier);
      return 1;
    }
  }
  return 0;
}

/* ---- programs ---- */

static void start_program(Emulator *e) {
  forget_shared(e);
  u32 now[MAX_CLOCKS] = {0}; /* what earlier programs did, everybody has seen */
  for (int i = 0; i < e->warp_count; i++) {
    now[i] = e->warps[i].seen[i];
    now[MAX_WARPS + i] = e->warps[i].groups_committed;
  }
  for (int i = 0; i < e->warp_count; i++) {
    Warp *w = &e->warps[i];
    for (s32 r = 0; r < e->register_count; r++)
      for (int lane = 0; lane < LANES; lane++) w->registers[r][lane] = 0xffc0dead; /* NaN, until they are written */
    w->pc = w->copy_count = w->copy_groups = 0;
    w->state = RUNNING;
    w->groups_done = w->groups_committed;
    memcpy(w->seen, now, sizeof now);
    memcpy(w->fenced, now, sizeof now);
    w->seen[i]++;
  }
}

/* Returns whether all its warps came to their end. */
static int run_program(Emulator *e) {
  start_program(e);
  e->executed = 0;
  for (;;) {
    if (count_in(e, DONE) == e->warp_count) return 1;
    if (count_in(e, RUNNING)) {
      if (!take_turn(e, drawn_running(e))) return 0;
    } else if (!open_any_barrier(e)) {
      Warp stuck = e->warps[0];
      for (int i = 0; i < e->warp_count; i++)
        if (e->warps[i].state == WAITING) stuck = e->warps[i];
      stuck.pc--; /* the barrier, not what follows */
      report(e, &stuck, DEADLOCK, 0, stuck.barrier, -1, -1);
      return 0;
    }
  }
}

/* ---- a launch ---- */

typedef struct {
  const Instruction *instructions;
  const Operand *operands;
  s32 instruction_count, register_count, warp_count, uses_wgmma;
  const u8 *parameters;
  s32 grid[3];
  u32 shared_base, shared_size;
  const u64 *buffer_bases, *buffer_sizes;
  s32 buffer_count;
  u64 seed, instruction_limit;
} Launch;

static void allocate_warp(const Launch *launch, Warp *w, int id) {
  w->id = id;
  w->registers = malloc((launch->register_count + 1) * sizeof(Lanes));
  if (!launch->uses_wgmma) return;
  w->accumulating = calloc(launch->register_count + 1, sizeof(u32));
  w->feeding = calloc(launch->register_count + 1, sizeof(u32));
  w->written_at = calloc(launch->register_count + 1, sizeof(u64));
}

static Emulator *allocate(const Launch *launch) {
  Emulator *e = calloc(1, sizeof(Emulator));
  e->instructions = launch->instructions;
  e->operands = launch->operands;
  e->instruction_count = launch->instruction_count;
  e->register_count = launch->register_count;
  e->warp_count = launch->warp_count;
  e->parameters = launch->parameters;
  memcpy(e->grid, launch->grid, sizeof e->grid);
  e->shared_base = launch->shared_base;
  e->shared_size = launch->shared_size;
  e->shared = malloc(e->shared_size);
  e->byte_state = malloc(e->shared_size);
  e->byte_writer = calloc(e->shared_size, 1);
  e->byte_write = calloc(e->shared_size, sizeof(Access));
  for (int i = 0; i < e->warp_count; i++) {
    allocate_warp(launch, &e->warps[i], i);
    e->byte_read[i] = calloc(e->shared_size, sizeof(Access));
    if (launch->uses_wgmma) e->byte_read[MAX_WARPS + i] = calloc(e->shared_size, sizeof(Access));
  }
  e->buffer_count = launch->buffer_count;
  e->buffers = calloc(e->buffer_count + 1, sizeof(Buffer));
  for (int i = 0; i < e->buffer_count; i++) {
    u64 size = launch->buffer_sizes[i];
    u32 *writer = calloc(size + 1, sizeof(u32)), *reader = calloc(size + 1, sizeof(u32));
    e->buffers[i] = (Buffer){launch->buffer_bases[i], size, writer, reader};
  }
  e->random = launch->seed * 0x9e3779b97f4a7c15 + 0x853c49e6748fea9b;
  e->instruction_limit = launch->instruction_limit;
  return e;
}

static void release(Emulator *e) {
  for (int i = 0; i < e->warp_count; i++) {
    Warp *w = &e->warps[i];
    free(w->registers);
    free(w->copies);
    free(w->accumulating);
    free(w->feeding);
    free(w->written_at);
    free(e->byte_read[i]);
    free(e->byte_read[MAX_WARPS + i]);
  }
  for (int i = 0; i < e->buffer_count; i++) {
    free(e->buffers[i].writer);
    free(e->buffers[i].reader);
  }
  free(e->buffers);
  free(e->shared);
  free(e->byte_state);
  free(e->byte_writer);
  free(e->byte_write);
  free(e);
}

/* Runs all programs. findings has room for MAX_FINDINGS; returns whether every program came to its end. */
__attribute__((visibility("default")))
int run_launch(const Launch *launch, Finding *findings, s32 *finding_count, u64 *executed) {
  Emulator *e = allocate(launch);
  int finished = 1;
  *executed = 0;
  for (e->program[2] = 0; e->program[2] < e->grid[2]; e->program[2]++)
    for (e->program[1] = 0; e->program[1] < e->grid[1]; e->program[1]++)
      for (e->program[0] = 0; e->program[0] < e->grid[0]; e->program[0]++) {
        finished = finished && run_program(e);
        *executed += e->executed;
        e->program_id++;
      }
  memcpy(findings, e->findings, e->finding_count * sizeof(Finding));
  *finding_count = e->finding_count;
  release(e);
  return finished;
}
