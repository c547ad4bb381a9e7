// The part of CUDA's driver that Triton calls, without a GPU: it checks what it is asked, as a driver does, and runs nothing.
//
// Any number of devices of compute capability 9.0. A context belongs to a device and is current in a thread; modules and functions belong to a
// context. Pointers are taken as they are, so tensors of the CPU stand for those of the device.

#include "cuda.h"
#include <elf.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEVICES = 1 << 20, TIMES = 4096, MULTIPROCESSORS = 132, PER_MULTIPROCESSOR = 233472, USUAL_SHARED = 49152 };

struct CUmod_st {
    CUcontext context;
    const char *image;
    size_t size;
};

struct CUfunc_st {
    CUcontext context;
    char name[256];
    int most_shared; // dynamic shared memory that a launch may ask for
};

typedef void (*Observer)(const CUlaunchConfig *config, CUfunction function, void **parameters);

static int most_shared = 232448; // that a program may opt in for
static _Thread_local CUcontext current;
static atomic_long modules, launches, waits;
static Observer observer;
static double times[TIMES]; // of the last launches, in seconds of Python's perf_counter

// For the tests.
void stub_set_most_shared(int bytes) { most_shared = bytes; }
void stub_set_observer(Observer function) { observer = function; }
void stub_set_device(int device) { current = (CUcontext)(uintptr_t)(device + 1); } // as torch does before it allocates
long stub_modules(void) { return modules; }
long stub_launches(void) { return launches; }
double stub_time(long launch) { return times[launch % TIMES]; }
long stub_waits(void) { return waits; }
const char *stub_name(CUfunction function) { return function->name; }
int stub_device(CUfunction function) { return (int)(uintptr_t)function->context - 1; }

CUresult cuGetErrorString(CUresult error, const char **text) {
    static _Thread_local char words[64];
    snprintf(words, sizeof words, "error %d of the stub", error);
    *text = words;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int number) {
    if (number < 0 || number >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = number;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = most_shared; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = PER_MULTIPROCESSOR; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE; // as of an older driver that is asked for something new
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    *device = (int)(uintptr_t)current - 1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    const Elf64_Ehdr *header = image;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    if (memcmp(image, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
    size_t sections = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t segments = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    *module = malloc(sizeof **module);
    (*module)->context = current;
    (*module)->size = sections > segments ? sections : segments;
    char *kept = malloc((*module)->size);
    memcpy(kept, image, (*module)->size);
    (*module)->image = kept;
    modules++;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    free((void *)module->image);
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    char section[300];
    int length = snprintf(section, sizeof section, ".text.%s", name);
    for (size_t at = 0; at + length < module->size; at++) {
        if (!memcmp(module->image + at, section, length + 1)) { // with the zero at its end
            *function = calloc(1, sizeof **function);
            (*function)->context = module->context;
            (*function)->most_shared = USUAL_SHARED;
            snprintf((*function)->name, sizeof(*function)->name, "%s", name);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value > most_shared) return CUDA_ERROR_INVALID_VALUE;
        function->most_shared = value;
        return CUDA_SUCCESS;
    }
    return attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    memcpy(value, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    if (!current || function->context != current) return CUDA_ERROR_INVALID_CONTEXT;
    if (!config->gridDimX || config->gridDimX > 2147483647u || !config->gridDimY || config->gridDimY > 65535 || !config->gridDimZ ||
        config->gridDimZ > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024) return CUDA_ERROR_INVALID_VALUE;
    if ((int)config->sharedMemBytes > function->most_shared) return CUDA_ERROR_INVALID_VALUE;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    times[launches++ % TIMES] = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (observer) observer(config, function, parameters);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

// What would wait for the GPU: nothing may call it.
CUresult cuCtxSynchronize(void) { waits++; return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) { waits++; return CUDA_SUCCESS; }
