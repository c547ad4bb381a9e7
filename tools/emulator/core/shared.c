/* Shared memory: bounds, reads of uninitialised memory, races, copies that cp.async has not delivered, proxy fences. */
#include "emulator.h"

#include <stdlib.h>

enum { UNWRITTEN, WRITTEN, PENDING };

static int within(Emulator *e, const Warp *w, u32 address, u32 size, int lane) {
  if (address >= e->shared_base && (u64)address + size <= (u64)e->shared_base + e->shared_size) return 1;
  report(e, w, SHARED_BOUNDS, lane, address, -1, -1);
  return 0;
}

/* Check a read of one byte. A matrix unit's reads need a proxy fence between the write and them. */
static void check_read(Emulator *e, const Warp *w, u32 at, int lane, int is_matrix) {
  int writer = e->byte_writer[at];
  Access written = e->byte_write[at];
  u64 address = e->shared_base + at;
  if (e->byte_state[at] == PENDING) {
    report(e, w, UNDELIVERED, lane, address, writer, written.instruction);
  } else if (e->byte_state[at] == UNWRITTEN) {
    report(e, w, UNINITIALISED, lane, address, -1, -1);
  } else if (writer != w->id && w->seen[writer] < written.clock) {
    report(e, w, SHARED_RACE, lane, address, writer, written.instruction);
  } else if (is_matrix && w->fenced[writer] < written.clock) {
    report(e, w, UNFENCED, lane, address, writer, written.instruction);
  }
}

static u8 *read_as(Emulator *e, const Warp *w, u32 address, u32 size, int lane, int clock, u32 now) {
  if (!within(e, w, address, size, lane)) return NULL;
  u32 first = address - e->shared_base;
  Access access = {now, w->pc};
  for (u32 at = first; at < first + size; at++) {
    check_read(e, w, at, lane, clock >= MAX_WARPS);
    e->byte_read[clock][at] = access;
  }
  return e->shared + first;
}

u8 *shared_read(Emulator *e, const Warp *w, u32 address, u32 size, int lane) {
  return read_as(e, w, address, size, lane, w->id, w->seen[w->id]);
}

u8 *shared_matrix_read(Emulator *e, const Warp *w, u32 address, u32 size, int lane) {
  return read_as(e, w, address, size, lane, MAX_WARPS + w->id, w->groups_committed + 1);
}

/* Check that a write comes after every read of its bytes, and after every write of another value. */
static void check_write(Emulator *e, const Warp *w, u32 first, u32 size, int lane, const u8 *data) {
  for (u32 at = first; at < first + size; at++) {
    int writer = e->byte_writer[at];
    Access written = e->byte_write[at];
    if (e->byte_state[at] == PENDING) {
      report(e, w, UNDELIVERED, lane, e->shared_base + at, writer, written.instruction);
    } else if (e->byte_state[at] == WRITTEN && writer != w->id && w->seen[writer] < written.clock) {
      int is_same = data && e->shared[at] == data[at - first]; /* warps that hold the same elements may all store them */
      if (!is_same) report(e, w, SHARED_RACE, lane, e->shared_base + at, writer, written.instruction);
    }
  }
  for (int clock = 0; clock < MAX_CLOCKS; clock++) {
    const Access *read = e->byte_read[clock];
    if (!read || clock == w->id) continue;
    for (u32 at = first; at < first + size; at++)
      if (w->seen[clock] < read[at].clock)
        report(e, w, SHARED_RACE, lane, e->shared_base + at, clock % MAX_WARPS, read[at].instruction);
  }
}

static void mark_written(Emulator *e, const Warp *w, u32 first, u32 size, int state, int instruction) {
  memset(e->byte_state + first, state, size);
  memset(e->byte_writer + first, w->id, size);
  for (u32 at = first; at < first + size; at++) e->byte_write[at] = (Access){w->seen[w->id], instruction};
}

void shared_write(Emulator *e, const Warp *w, u32 address, u32 size, int lane, const u8 *data) {
  if (!within(e, w, address, size, lane)) return;
  u32 first = address - e->shared_base;
  check_write(e, w, first, size, lane, data);
  mark_written(e, w, first, size, WRITTEN, w->pc);
  memcpy(e->shared + first, data, size);
}

/* Check that lanes of one store that write a byte in common write the same. data: size bytes for each lane, step apart. */
void check_lanes_agree(Emulator *e, const Warp *w, const u64 *address, u32 active, u32 size, u32 step, const u8 *data) {
  for (int lane = 1; lane < LANES; lane++) {
    for (int other = 0; other < lane; other++) {
      u64 distance = address[lane] - address[other]; /* from -size + 1 to size - 1 if they overlap */
      if (distance + size - 1 > 2 * (u64)size - 2 || !(active >> lane & 1) || !(active >> other & 1)) continue;
      u64 low = address[lane] > address[other] ? address[lane] : address[other];
      u64 overlap = (address[lane] < address[other] ? address[lane] : address[other]) + size - low;
      const u8 *mine = data + lane * step + (low - address[lane]), *others = data + other * step + (low - address[other]);
      if (memcmp(mine, others, overlap)) report(e, w, LANES_DISAGREE, lane, low, w->id, w->pc);
    }
  }
}

/* ---- cp.async: the destination holds NaN until the wait ---- */

void start_copy(Emulator *e, Warp *w, u32 destination, u64 from, u32 size, u32 copied, int lane) {
  if (!within(e, w, destination, size, lane)) return;
  u32 first = destination - e->shared_base;
  check_write(e, w, first, size, lane, NULL);
  mark_written(e, w, first, size, PENDING, w->pc);
  memset(e->shared + first, 0xff, size);
  if (w->copy_count == w->copy_room) {
    w->copy_room = 2 * w->copy_room + 64;
    w->copies = realloc(w->copies, w->copy_room * sizeof(Copy));
  }
  const u8 *bytes = copied ? global_bytes(e, w, from, copied, lane, 0) : NULL;
  w->copies[w->copy_count++] = (Copy){first, size, copied, bytes, -1, w->pc};
}

void commit_copies(Warp *w) {
  for (int i = 0; i < w->copy_count; i++)
    if (w->copies[i].group < 0) w->copies[i].group = w->copy_groups;
  w->copy_groups++;
}

static void deliver(Emulator *e, Warp *w, const Copy *copy) {
  memset(e->shared + copy->first, 0, copy->size);
  if (copy->from) memcpy(e->shared + copy->first, copy->from, copy->copied);
  mark_written(e, w, copy->first, copy->size, WRITTEN, copy->instruction);
}

/* Deliver all committed groups but the last so many. */
void deliver_copies(Emulator *e, Warp *w, s32 groups_left) {
  int kept = 0;
  for (int i = 0; i < w->copy_count; i++) {
    Copy copy = w->copies[i];
    if (copy.group < 0 || copy.group >= w->copy_groups - groups_left)
      w->copies[kept++] = copy;
    else
      deliver(e, w, &copy);
  }
  w->copy_count = kept;
}

/* Forget what was written, for a new program. */
void forget_shared(Emulator *e) {
  memset(e->shared, 0xff, e->shared_size);
  memset(e->byte_state, UNWRITTEN, e->shared_size);
}
