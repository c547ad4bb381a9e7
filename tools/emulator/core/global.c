/* Global memory: the bounds of the tensors, and programs that touch what another one writes. */
#include "emulator.h"

static const u32 SEVERAL = ~0u;

static Buffer *buffer_of(Emulator *e, u64 address, u32 size) {
  for (int i = 0; i < e->buffer_count; i++) {
    int index = (e->last_buffer + i) % e->buffer_count; /* mostly the one before */
    Buffer *b = &e->buffers[index];
    if (address >= b->base && address + size <= b->base + b->size) {
      e->last_buffer = index;
      return b;
    }
  }
  return NULL;
}

u8 *global_bytes(Emulator *e, const Warp *w, u64 address, u32 size, int lane, int is_write) {
  Buffer *b = buffer_of(e, address, size);
  if (!b) {
    report(e, w, GLOBAL_BOUNDS, lane, address, -1, -1);
    return NULL;
  }
  u32 self = e->program_id + 1;
  for (u64 i = address - b->base; i < address - b->base + size; i++) {
    if (b->writer[i] && b->writer[i] != self) report(e, w, GLOBAL_RACE, lane, address, b->writer[i] - 1, -1);
    if (is_write) {
      if (b->reader[i] && b->reader[i] != self)
        report(e, w, GLOBAL_RACE, lane, address, b->reader[i] == SEVERAL ? -1 : (s32)b->reader[i] - 1, -1);
      b->writer[i] = self;
    } else if (b->reader[i] != self) {
      b->reader[i] = b->reader[i] ? SEVERAL : self;
    }
  }
  return (u8 *)(uintptr_t)address;
}
