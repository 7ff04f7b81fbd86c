// Stands in for libcuda.so.1 where there is no device: its memory is the host's, its kernels
// are those of host_kernel.cpp, and everything is done at once. Knows only what is called.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "host_kernel.cpp"

using Result = int;
static const Result kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500;
static thread_local void* context;
static thread_local int capture_mode;
static int the_context, the_module;

// Set by the test's environment: what page-locking answers.
static Result lock_result() {
    const char* wanted = std::getenv("FAKE_LOCK_RESULT");
    return wanted ? std::atoi(wanted) : 0;
}

struct Copy2D {  // CUDA_MEMCPY2D_v2
    size_t src_x, src_y;
    int src_type;
    const char* src_host;
    char* src_device;
    void* src_array;
    size_t src_pitch, dst_x, dst_y;
    int dst_type;
    char* dst_host;
    char* dst_device;
    void* dst_array;
    size_t dst_pitch, width, height;
};

extern "C" {
Result cuInit(unsigned) { return 0; }
Result cuDriverGetVersion(int* version) { *version = 12090; return 0; }
Result cuCtxGetCurrent(void** out) { *out = &the_context; return 0; }
Result cuCtxSetCurrent(void* wanted) {
    context = wanted;
    return wanted == &the_context ? 0 : kInvalidValue;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return 0;
}
Result cuModuleLoadData(void** module, const char* image) {
    *module = &the_module;
    return std::memcmp(image, "\x7f" "ELF", 4) ? kInvalidValue : 0;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    for (const auto& entry : kKernels)
        if (!std::strcmp(entry.name, name)) {
            *function = const_cast<char*>(entry.name);
            return module == &the_module ? 0 : kInvalidValue;
        }
    return kNotFound;
}
// Relaxed capture mode is 2.
static Result checked(void* stream) {
    if (context != &the_context || capture_mode != 2) return kInvalidContext;
    return stream ? 0 : kInvalidValue;
}
Result cuMemcpyHtoDAsync(char* to, const void* from, size_t bytes, void* stream) {
    if (Result bad = checked(stream)) return bad;
    std::memcpy(to, from, bytes);
    return 0;
}
Result cuMemcpyDtoHAsync(void* to, const char* from, size_t bytes, void* stream) {
    if (Result bad = checked(stream)) return bad;
    std::memcpy(to, from, bytes);
    return 0;
}
Result cuMemcpy2DAsync(const Copy2D* copy, void* stream) {
    if (Result bad = checked(stream)) return bad;
    if (copy->src_type != 1 || copy->dst_type != 2) return kInvalidValue;
    for (size_t row = 0; row < copy->height; ++row)
        std::memcpy(copy->dst_device + row * copy->dst_pitch,
                    copy->src_host + row * copy->src_pitch, copy->width);
    return 0;
}
Result cuLaunchKernel(const char* name, unsigned x, unsigned y, unsigned z, unsigned threads,
                      unsigned ty, unsigned tz, unsigned shared, void* stream, void** arguments,
                      void** extra) {
    if (Result bad = checked(stream)) return bad;
    if (y != 1 || z != 1 || ty != 1 || tz != 1 || shared || extra) return kInvalidValue;
    return run(name, x, threads, *static_cast<const Layer**>(arguments[0]),
               *static_cast<const Page**>(arguments[1]), static_cast<const Shape*>(arguments[2]))
               ? kInvalidValue : 0;
}
Result cuMemHostRegister(void*, size_t, unsigned flags) {
    return flags & ~0x9u ? kInvalidValue : lock_result();
}
Result cuMemHostUnregister(void*) { return 0; }
Result cuGetErrorString(Result, const char** text) { *text = "an error"; return 0; }

Result cuGetProcAddress_v2(const char* symbol, void** found, int, unsigned long long, int* status) {
    *found = std::strcmp(symbol, "cuGetProcAddress") ? dlsym(RTLD_DEFAULT, symbol)
                                                     : (void*)cuGetProcAddress_v2;
    if (!*found) {
        static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        *found = dlsym(self, symbol);
    }
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : kNotFound;
}
Result cuGetProcAddress(const char* symbol, void** found, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(symbol, found, version, flags, nullptr);
}
}
