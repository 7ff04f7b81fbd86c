// Stands in for libcuda.so.1 where there is no device: its memory is the host's, its kernels
// are those of host_kernel.cpp, and streams go on in an order drawn by chance, when somebody asks
// for an event. Knows only what is called, and refuses what a driver would: no context, a foreign
// address, a handle of nothing, memory that cannot be page-locked. After a fault on the device every
// call fails. Where drivers differ, or no document says what they do, the environment decides:
//
//     FAKE_DRIVER_VERSION          12090 unless set
//     FAKE_ATTRIBUTE               every attribute of the device without a variable of its own: 1
//     FAKE_HOST_POINTERS           whether it takes addresses of page-locked memory as they are: 1
//     FAKE_LOCKS_READ_ONLY         whether it page-locks read-only mappings (no card seen does): 0
//     FAKE_LOCK_RESULT             what page-locking answers, whatever it is asked
//     FAKE_REFUSES_BATCHES         set: no call for many copies is taken
//     FAKE_BATCH_MS                how long such a call takes, to stand for one that hangs: 0
//     FAKE_UNLOCKED_BATCHES        one with memory that is not locked is taken ("stage", the
//                                  default), refused ("refuse"), or faults ("fault")
//     FAKE_UNLOCK_WAITS            0: unlocking waits for no copy, and one under way faults
//     FAKE_NO_READ_ONLY, FAKE_FABRIC, FAKE_RDMA_*, FAKE_MOVES_NOTHING: see where they are read

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host_kernel.cpp"

using Result = int;
static const Result kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101,
                    kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500,
                    kNotReady = 600, kIllegalAddress = 700, kRegistered = 712, kNotRegistered = 713, kNotPermitted = 800,
                    kNotSupported = 801, kUnknown = 999;
static const int kRelaxed = 2, kDevices = 2, kHighest = -5;
static thread_local std::vector<void*> contexts;
static thread_local int capture_mode;
static int primary[kDevices], the_module;

static std::mutex lock;
using Reached = std::shared_ptr<bool>;
struct Work {
    std::function<void()> run;
    Reached after;  // of another stream, or null
};
struct Stream {
    std::deque<Work> work;
    int priority;
};
static std::map<void*, Stream> streams;
static std::map<void*, Reached> events;  // as it was recorded last; null: never
static int batches, batched;  // calls of cuMemcpyBatchAsync, and their copies
static int batch_order, batch_flags;
static std::atomic<int> calls;  // that need a context
static std::atomic<Result> fault;  // of the device: what every later call answers
static std::atomic<int> flushes;  // of what RDMA wrote

static unsigned drawn(unsigned below) {
    static unsigned long long seed = 1;
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>(seed >> 33) % below;
}
// Some stream does what it has next; false when none can.
static bool step() {
    std::vector<Stream*> able;
    for (auto& [_, stream] : streams)
        if (!stream.work.empty() && (!stream.work[0].after || *stream.work[0].after))
            able.push_back(&stream);
    if (able.empty()) return false;
    auto& work = able[drawn(able.size())]->work;
    if (work[0].run) work[0].run();
    work.pop_front();
    return true;
}
static void finish_all() {
    std::lock_guard<std::mutex> held(lock);
    while (step()) {}
}

struct BatchAttributes {  // CUmemcpyAttributes
    int source_order, hints[4];
    unsigned flags;
};
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
    ++calls;
    if (fault) return fault;
    return contexts.empty() || capture_mode != kRelaxed ? kInvalidContext : 0;
}
static Result checked(void* stream) {
    std::lock_guard<std::mutex> held(lock);
    return streams.count(stream) ? checked() : kInvalidHandle;
}

static void queue(void* stream, std::function<void()> run, Reached after = nullptr) {
    std::lock_guard<std::mutex> held(lock);
    streams[stream].work.push_back({run, after});
}
// Copies and kernels; where FAKE_MOVES_NOTHING is set, what calls cost is all that is left.
static void move(void* stream, std::function<void()> run) {
    if (!std::getenv("FAKE_MOVES_NOTHING")) queue(stream, run);
}

static std::string variable(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value ? value : otherwise;
}

#include "fake_driver_memory.h"

extern "C" {
Result cuInit(unsigned) { return 0; }
static int the_version() {
    const char* wanted = std::getenv("FAKE_DRIVER_VERSION");
    return wanted ? std::atoi(wanted) : 12090;
}
Result cuDriverGetVersion(int* version) { *version = the_version(); return 0; }
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
Result cuDeviceGetAttribute(int* has, int attribute, int) {
    if (attribute == 128) {  // handles of a fabric
        *has = the_domain() != nullptr;
        return 0;
    }
    const char* wanted = std::getenv(attribute == 117   ? "FAKE_RDMA_FLUSH_OPTIONS"
                                     : attribute == 118 ? "FAKE_RDMA_WRITES_ORDERING"
                                     : attribute == 113 ? "FAKE_LOCKS_READ_ONLY"
                                     : attribute == 91  ? "FAKE_HOST_POINTERS"
                                                        : "FAKE_ATTRIBUTE");
    if (!wanted && attribute == 91) wanted = std::getenv("FAKE_ATTRIBUTE");
    *has = wanted ? std::atoi(wanted) : attribute != 113;
    return 0;
}
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
Result cuCtxSynchronize() {
    if (Result bad = checked()) return bad;
    finish_all();
    return fault;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return 0;
}

Result cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
    *lowest = 0, *highest = kHighest;
    return checked();
}
Result cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    streams[*stream = new int].priority = priority;
    return flags == 1 ? 0 : kInvalidValue;  // non-blocking
}
Result cuStreamCreate(void** stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}
Result cuStreamGetPriority(void* stream, int* priority) {
    std::lock_guard<std::mutex> held(lock);
    *priority = streams[stream].priority;
    return checked();
}
Result cuStreamDestroy(void* stream) {
    finish_all();
    std::lock_guard<std::mutex> held(lock);
    return streams.erase(stream) ? checked() : kInvalidHandle;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    if (Result bad = checked(stream)) return bad;
    Reached reached;
    {
        std::lock_guard<std::mutex> held(lock);
        auto found = events.find(event);
        if (found == events.end() || flags) return kInvalidHandle;
        reached = found->second;
    }
    queue(stream, nullptr, reached);
    return 0;
}
Result cuEventCreate(void** event, unsigned flags) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    events[*event = new int];
    return flags & 2 ? 0 : kInvalidValue;  // without times
}
Result cuEventRecord(void* event, void* stream) {
    if (Result bad = checked(stream)) return bad;
    Reached reached(new bool(false));
    {
        std::lock_guard<std::mutex> held(lock);
        if (!events.count(event)) return kInvalidHandle;
        events[event] = reached;
    }
    queue(stream, [reached] { *reached = true; });
    return 0;
}
Result cuEventQuery(void* event) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = events.find(event);
    if (found == events.end()) return kInvalidHandle;
    if (!found->second || *found->second) return 0;
    for (int i = 0; i < 4; ++i) step();
    return kNotReady;
}
Result cuEventSynchronize(void* event) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = events.find(event);
    if (found == events.end()) return kInvalidHandle;
    Reached reached = found->second;
    while (reached && !*reached)
        if (!step()) return kUnknown;  // it would wait for ever
    return fault;
}
Result cuEventDestroy(void* event) {
    std::lock_guard<std::mutex> held(lock);
    return events.erase(event) ? checked() : kInvalidHandle;
}
// Whether some of a range is page-locked; `whole` tells whether all of it was locked at once.
static bool is_locked(const char* at, size_t bytes, bool* whole) {
    for (const auto& [start, length] : registered)
        if (start < at + bytes && at < start + length) {
            *whole = start <= at && at + bytes <= start + length;
            return true;
        }
    return false;
}
static void moved(char* to, const char* from, size_t bytes, char* locked) {
    bool whole;
    std::lock_guard<std::mutex> held(lock_of_registered);
    if (locked && !is_locked(locked, 1, &whole))
        fault = kIllegalAddress;  // it was unlocked meanwhile
    else
        std::memmove(to, from, bytes);
}
static Result copied(char* to, const char* from, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (!on_device(to, bytes) && !on_device(from, bytes)) return kInvalidValue;
    return on_device(to, bytes) && !on_device(to, bytes, kReadWrite) ? kInvalidValue : 0;
}
Result cuMemcpyAsync(char* to, const char* from, size_t bytes, void* stream) {
    if (Result bad = checked(stream)) return bad;
    if (Result bad = copied(to, from, bytes)) return bad;
    char* locked = nullptr;
    {
        std::lock_guard<std::mutex> held(lock_of_registered);
        bool whole;
        for (char* at : {to, const_cast<char*>(from)})
            if (is_locked(at, bytes, &whole)) locked = at;
    }
    move(stream, [=] { moved(to, from, bytes, locked); });
    return 0;
}
Result cuMemcpyHtoDAsync(char* to, const void* from, size_t bytes, void* stream) {
    return cuMemcpyAsync(to, static_cast<const char*>(from), bytes, stream);
}
Result cuMemcpy2DAsync(const Copy2D* given, void* stream) {
    if (Result bad = checked(stream)) return bad;
    Copy2D copy = *given;
    if (copy.dst_type != 2 || copy.src_type < 1 || copy.src_type > 2) return kInvalidValue;
    const char* from = copy.src_type == 1 ? copy.src_host : copy.src_device;
    move(stream, [=] {
        for (size_t row = 0; row < copy.height; ++row)
            std::memcpy(copy.dst_device + row * copy.dst_pitch, from + row * copy.src_pitch,
                        copy.width);
    });
    return 0;
}
// As it was in 12.8. Its copies come in no order, and none goes over the border of what was
// page-locked at once. With source order ANY (3) a source may be read now, in this call.
Result cuMemcpyBatchAsync(char** to, char** from, size_t* bytes, size_t count,
                          const BatchAttributes* attributes, size_t* firsts, size_t kinds,
                          size_t* failed, void* stream) {
    if (Result bad = checked(stream)) return bad;
    *failed = ~size_t(0);
    usleep(1000 * std::atoi(variable("FAKE_BATCH_MS", "0").c_str()));
    int order = attributes->source_order;
    if (!count || kinds != 1 || firsts[0] || order < 1 || order > 3 || attributes->flags > 1 ||
        std::getenv("FAKE_REFUSES_BATCHES"))
        return kInvalidValue;
    std::string unlocked = variable("FAKE_UNLOCKED_BATCHES", "stage");
    std::vector<std::function<void()>> copies;
    for (size_t i = 0; i < count; ++i) {
        char *target = to[i], *source = from[i], *locked = nullptr;
        size_t size = bytes[i];
        *failed = i;
        if (!size || copied(target, source, size)) return kInvalidValue;
        {
            std::lock_guard<std::mutex> held(lock_of_registered);
            for (char* at : {target, source}) {
                bool whole = true;
                if (is_locked(at, size, &whole)) locked = at;
                if (!whole) return kInvalidValue;
            }
        }
        std::lock_guard<std::mutex> held(lock);
        bool host = !on_device(target, size) || !on_device(source, size);
        if (host && !locked && unlocked == "refuse") return kInvalidValue;
        bool faults = host && (locked ? variable("FAKE_HOST_POINTERS", "1") == "0"
                                      : unlocked == "fault");
        std::function<void()> copy = [=] { moved(target, source, size, locked); };
        if (faults)
            copy = [] { fault = kIllegalAddress; };
        else if (order != 1 && drawn(2)) {
            std::string now(source, size);
            copy = [=] { moved(target, now.data(), size, locked); };
        }
        copies.insert(copies.begin() + drawn(copies.size() + 1), copy);
    }
    ++batches, batched += count, batch_order = order, batch_flags = attributes->flags;
    for (auto& copy : copies) move(stream, copy);
    return 0;
}
// Of the last call: source order and flags.
void fake_batch_attributes(int* order, int* flags) { *order = batch_order, *flags = batch_flags; }
// What a wrong address in a kernel does to the process.
void fake_fault() { fault = kIllegalAddress; }
void fake_batches(int* calls, int* copies) { *calls = batches, *copies = batched; }
int fake_calls() { return calls; }

Result cuFlushGPUDirectRDMAWrites(int target, int scope) {
    if (Result bad = checked()) return bad;
    if (target != 0 || scope != 100) return kInvalidValue;  // of this context, to its owner
    ++flushes;
    return 0;
}
int fake_flushes() { return flushes; }

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
    const Layer* layers = *static_cast<const Layer**>(arguments[0]);
    const Page* pages = *static_cast<const Page**>(arguments[1]);
    Shape shape = *static_cast<const Shape*>(arguments[2]);
    move(stream, [=] {
        if (run(name, x, threads, layers, pages, &shape)) std::abort();
    });
    return 0;
}
Result cuGetErrorString(Result, const char** text) { *text = "an error"; return 0; }

Result cuGetProcAddress_v2(const char* symbol, void** found, int version, unsigned long long,
                           int* status) {
    if (!std::strcmp(symbol, "cuMemcpyBatchAsync") && (the_version() < 12080 || version < 12080)) {
        *found = nullptr;
        if (status) *status = 2;  // of a later version
        return the_version() < version ? kInvalidValue : 0;
    }
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
