// Stands in for libcuda.so.1 where there is no device: its memory is the host's, its kernels
// are those of host_kernel.cpp, and everything is done at once. Knows only what is called,
// and refuses what a driver would: no context, a foreign address, a handle of nothing.

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "host_kernel.cpp"

using Result = int;
static const Result kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101,
                    kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                    kNotReady = 600, kRegistered = 712, kNotRegistered = 713, kNotPermitted = 800,
                    kNotSupported = 801;
static const int kRelaxed = 2, kDevices = 2;
static thread_local std::vector<void*> contexts;
static thread_local int capture_mode;
static int primary[kDevices], the_module;

static std::mutex lock;
static std::set<void*> streams;
static std::map<void*, int> events;  // how often each has been asked since it was recorded

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

// Every call that may end the capture of a CUDA graph, or needs a context.
static Result checked() {
    return contexts.empty() || capture_mode != kRelaxed ? kInvalidContext : 0;
}
static Result checked(void* stream) {
    std::lock_guard<std::mutex> held(lock);
    return streams.count(stream) ? checked() : kInvalidHandle;
}

#include "fake_driver_memory.h"

extern "C" {
Result cuInit(unsigned) { return 0; }
Result cuDriverGetVersion(int* version) { *version = 12090; return 0; }
Result cuDeviceGetCount(int* count) { *count = kDevices; return 0; }
Result cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < 0 || ordinal >= kDevices ? kInvalidDevice : 0;
}
Result cuDeviceGetUuid(char* uuid, int device) {  // with zeros in it, as real ones have
    for (int i = 0; i < 16; ++i) uuid[i] = static_cast<char>(i % 5 * 60);
    uuid[15] = static_cast<char>(device);
    return 0;
}
Result cuDeviceGetAttribute(int* has, int, int) { *has = 1; return 0; }
Result cuDeviceCanAccessPeer(int* can, int, int) { *can = 0; return 0; }
Result cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = &primary[device];
    return 0;
}
Result cuCtxGetCurrent(void** out) {
    *out = contexts.empty() ? nullptr : contexts.back();
    return 0;
}
Result cuCtxSetCurrent(void* wanted) {
    if (!contexts.empty()) contexts.pop_back();
    contexts.push_back(wanted);
    return wanted ? 0 : kInvalidValue;
}
Result cuCtxPushCurrent(void* context) {
    contexts.push_back(context);
    return context ? 0 : kInvalidContext;
}
Result cuCtxPopCurrent(void** context) {
    if (contexts.empty()) return kInvalidContext;
    *context = contexts.back();
    contexts.pop_back();
    return 0;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return 0;
}

Result cuStreamCreate(void** stream, unsigned flags) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    streams.insert(*stream = new int);
    return flags == 1 ? 0 : kInvalidValue;  // non-blocking
}
Result cuStreamDestroy(void* stream) {
    std::lock_guard<std::mutex> held(lock);
    return streams.erase(stream) ? checked() : kInvalidHandle;
}
Result cuEventCreate(void** event, unsigned flags) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    events[*event = new int] = 1;
    return flags & 2 ? 0 : kInvalidValue;  // without times
}
Result cuEventRecord(void* event, void* stream) {
    if (Result bad = checked(stream)) return bad;
    std::lock_guard<std::mutex> held(lock);
    if (!events.count(event)) return kInvalidHandle;
    events[event] = 0;
    return 0;
}
Result cuEventQuery(void* event) {  // it is not reached the first time
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = events.find(event);
    return found == events.end() ? kInvalidHandle : found->second++ ? 0 : kNotReady;
}
Result cuEventSynchronize(void* event) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    return events.count(event) ? 0 : kInvalidHandle;
}
Result cuEventDestroy(void* event) {
    std::lock_guard<std::mutex> held(lock);
    return events.erase(event) ? checked() : kInvalidHandle;
}
Result cuMemcpyAsync(char* to, const char* from, size_t bytes, void* stream) {
    if (Result bad = checked(stream)) return bad;
    std::lock_guard<std::mutex> held(lock);
    if (!on_device(to, bytes) && !on_device(from, bytes)) return kInvalidValue;
    if (on_device(to, bytes) && !on_device(to, bytes, kReadWrite)) return kInvalidValue;
    std::memmove(to, from, bytes);
    return 0;
}
Result cuMemcpyHtoDAsync(char* to, const void* from, size_t bytes, void* stream) {
    if (Result bad = checked(stream)) return bad;
    std::memcpy(to, from, bytes);
    return 0;
}
Result cuMemcpyDtoHAsync(void* to, const char* from, size_t bytes, void* stream) {
    return cuMemcpyHtoDAsync(static_cast<char*>(to), from, bytes, stream);
}
Result cuMemcpyDtoDAsync(char* to, const char* from, size_t bytes, void* stream) {
    return cuMemcpyHtoDAsync(to, from, bytes, stream);
}
Result cuMemcpy2DAsync(const Copy2D* copy, void* stream) {
    if (Result bad = checked(stream)) return bad;
    if (copy->dst_type != 2 || copy->src_type < 1 || copy->src_type > 2) return kInvalidValue;
    const char* from = copy->src_type == 1 ? copy->src_host : copy->src_device;
    for (size_t row = 0; row < copy->height; ++row)
        std::memcpy(copy->dst_device + row * copy->dst_pitch, from + row * copy->src_pitch,
                    copy->width);
    return 0;
}

Result cuModuleLoadData(void** module, const char* image) {
    *module = &the_module;
    return std::memcmp(image, "\x7f" "ELF", 4) ? kInvalidValue : checked();
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    for (const auto& entry : kKernels)
        if (!std::strcmp(entry.name, name)) {
            *function = const_cast<char*>(entry.name);
            return module == &the_module ? checked() : kInvalidValue;
        }
    return kNotFound;
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
