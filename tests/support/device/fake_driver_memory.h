// Memory of fake_driver.cpp: what processes share by descriptors, plain allocations, and
// host memory that is page-locked. Shared memory is a memfd.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

static const size_t kMemory = size_t(1) << 40, kGranule = size_t(2) << 20;
static const int kPinned = 1, kByDescriptor = 1, kByFabric = 8, kRead = 1, kReadWrite = 3;

struct Location {
    int type, id;
};
struct AllocationProp {  // CUmemAllocationProp
    int type, handle_types;
    Location location;
    void* win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct AccessDesc {
    Location location;
    int flags;
};
struct Memory {  // what a handle stands for
    int file;
    size_t bytes;
    bool own;  // made by this process
    bool fabric;
};
struct Mapping {
    int file;  // -1: a plain allocation
    size_t bytes;
    int access;
    bool own, fabric;
};
struct FabricHandle {  // opens the file of a process, for processes of the same domain
    char domain[32];
    pid_t owner;
    int file;
    ino_t number;
    char rest[16];
};
static_assert(sizeof(FabricHandle) == 64, "as CUmemFabricHandle");
// The NVLink domain that this process may share memory in; null: none.
static const char* the_domain() { return std::getenv("FAKE_FABRIC"); }
static std::map<char*, Mapping> mappings;
static std::map<char*, size_t> reserved, registered;
static std::mutex lock_of_registered;  // taken inside `lock`, too
static std::map<uint64_t, Memory> handles;

static uint64_t handle_of(int file, size_t bytes, bool own, bool fabric) {
    static uint64_t last;
    handles[++last] = {file, bytes, own, fabric};
    return last;
}
static ino_t number_of(int file) {
    struct stat about;
    return fstat(file, &about) ? 0 : about.st_ino;
}
// Nothing promises that a process may import what it has made.
static bool is_own(int file) {
    for (const auto& [start, mapping] : mappings)
        if (mapping.own && mapping.file >= 0 && number_of(mapping.file) == number_of(file))
            return true;
    return false;
}
static Result imported(uint64_t* out, int file, bool fabric) {
    struct stat about;
    if (fstat(file, &about) || fcntl(file, F_GET_SEALS) < 0 || about.st_size % kGranule)
        return kInvalidValue;
    if (is_own(file)) return kNotPermitted;
    *out = handle_of(dup(file), about.st_size, false, fabric);
    return 0;
}
static bool on_device(const char* address, size_t bytes, int access = kRead) {
    auto after = mappings.upper_bound(const_cast<char*>(address));
    if (after == mappings.begin()) return false;
    const auto& [start, known] = *--after;
    return address + bytes <= start + known.bytes && (known.access & access) == access;
}

// Whether this process has every page of a range mapped, and may write there if `writable`.
static bool mapped_in_full(const char* address, size_t bytes, bool writable) {
    uintptr_t at = reinterpret_cast<uintptr_t>(address), end = at + bytes, first, last;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; at < end && std::getline(maps, line);) {
        char may[5];
        if (std::sscanf(line.c_str(), "%lx-%lx %4s", &first, &last, may) != 3) return false;
        if (first > at) return false;
        if (last > at && (may[0] != 'r' || (writable && may[1] != 'w'))) return false;
        at = std::max(at, last);
    }
    return at >= end;
}

extern "C" {
Result cuMemAlloc(char** out, size_t bytes) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    void* there = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (there == MAP_FAILED) return kOutOfMemory;
    mappings[*out = static_cast<char*>(there)] = {-1, bytes, kReadWrite, true, false};
    return 0;
}
Result cuMemFree(char* address) {
    if (Result bad = checked()) return bad;
    finish_all();
    std::lock_guard<std::mutex> held(lock);
    auto found = mappings.find(address);
    if (found == mappings.end() || found->second.file >= 0) return kInvalidValue;
    munmap(address, found->second.bytes);
    mappings.erase(found);
    return 0;
}
Result cuMemHostAlloc(char** out, size_t bytes, unsigned) {
    if (Result bad = checked()) return bad;
    if (posix_memalign(reinterpret_cast<void**>(out), 4096, bytes)) return kOutOfMemory;
    std::lock_guard<std::mutex> held(lock_of_registered);
    registered[*out] = bytes;
    return 0;
}
Result cuMemsetD8(char* to, unsigned char byte, size_t count) {
    if (Result bad = checked()) return bad;
    finish_all();
    std::lock_guard<std::mutex> held(lock);
    if (!on_device(to, count, kReadWrite)) return kInvalidValue;
    std::memset(to, byte, count);
    return 0;
}
Result cuMemGetAllocationGranularity(size_t* out, const AllocationProp*, int) {
    *out = kGranule;
    return checked();
}
Result cuMemCreate(uint64_t* out, size_t bytes, const AllocationProp* wanted, uint64_t flags) {
    if (Result bad = checked()) return bad;
    bool fabric = wanted->handle_types & kByFabric;
    // Where a device could and this process has no channel to its domain.
    if (fabric && (!the_domain() || !*the_domain())) return kNotPermitted;
    if (wanted->type != kPinned || (wanted->handle_types & ~kByFabric) != kByDescriptor || flags ||
        wanted->location.type != 1 || wanted->location.id >= kDevices || wanted->rdma > 1 ||
        !bytes || bytes % kGranule)
        return kInvalidValue;
    if (bytes > kMemory) return kOutOfMemory;
    std::lock_guard<std::mutex> held(lock);
    int file = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) return kOutOfMemory;
    *out = handle_of(file, bytes, true, fabric);
    return 0;
}
Result cuMemRelease(uint64_t handle) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = handles.find(handle);
    if (found == handles.end()) return kInvalidValue;
    close(found->second.file);
    handles.erase(found);
    return 0;
}
Result cuMemRetainAllocationHandle(uint64_t* out, char* address) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = mappings.find(address);
    if (found == mappings.end() || found->second.file < 0) return kInvalidValue;
    const Mapping& known = found->second;
    *out = handle_of(dup(known.file), known.bytes, known.own, known.fabric);
    return 0;
}
Result cuMemExportToShareableHandle(void* out, uint64_t handle, int type, uint64_t flags) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = handles.find(handle);
    if (found == handles.end() || flags) return kInvalidValue;
    if (type == kByDescriptor) {
        int copy = dup(found->second.file);
        *static_cast<int*>(out) = copy;
        return copy < 0 ? kOutOfMemory : 0;
    }
    if (type != kByFabric || !found->second.fabric) return kInvalidValue;
    FabricHandle way = {};
    std::strncpy(way.domain, the_domain(), sizeof way.domain - 1);
    way.owner = getpid();
    way.number = number_of(found->second.file);
    for (const auto& [start, mapping] : mappings)
        if (mapping.own && mapping.file >= 0 && number_of(mapping.file) == way.number)
            way.file = mapping.file;  // as long as the memory is mapped there
    std::memcpy(out, &way, sizeof way);
    return 0;
}
Result cuMemImportFromShareableHandle(uint64_t* out, void* given, int type) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    if (type == kByDescriptor)
        return imported(out, static_cast<int>(reinterpret_cast<intptr_t>(given)), false);
    if (type != kByFabric) return kInvalidValue;
    FabricHandle way;
    std::memcpy(&way, given, sizeof way);
    if (!the_domain() || std::strncmp(way.domain, the_domain(), sizeof way.domain))
        return kNotPermitted;
    std::string path = "/proc/" + std::to_string(way.owner) + "/fd/" + std::to_string(way.file);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    Result result = file < 0 || number_of(file) != way.number ? kInvalidHandle
                                                              : imported(out, file, true);
    if (file >= 0) close(file);
    return result;
}
Result cuMemAddressReserve(char** out, size_t bytes, size_t, char*, uint64_t flags) {
    if (Result bad = checked()) return bad;
    if (flags || !bytes || bytes % kGranule) return kInvalidValue;
    std::lock_guard<std::mutex> held(lock);
    void* there = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (there == MAP_FAILED) return kOutOfMemory;
    reserved[*out = static_cast<char*>(there)] = bytes;
    return 0;
}
Result cuMemAddressFree(char* address, size_t bytes) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = reserved.find(address);
    if (found == reserved.end() || found->second != bytes || mappings.count(address))
        return kInvalidValue;
    munmap(address, bytes);
    reserved.erase(found);
    return 0;
}
Result cuMemMap(char* at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = handles.find(handle);
    if (found == handles.end() || !reserved.count(at) || reserved[at] < bytes || offset || flags ||
        bytes > found->second.bytes)
        return kInvalidValue;
    int file = dup(found->second.file);
    if (mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        return kOutOfMemory;
    mappings[at] = {file, bytes, 0, found->second.own, found->second.fabric};
    return 0;
}
Result cuMemSetAccess(char* at, size_t bytes, const AccessDesc* wanted, size_t count) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = mappings.find(at);
    if (found == mappings.end() || found->second.bytes != bytes || count != 1) return kInvalidValue;
    int flags = wanted->flags;
    if (flags == kRead && std::getenv("FAKE_NO_READ_ONLY")) return kNotSupported;
    if (flags != kRead && flags != kReadWrite) return kInvalidValue;
    found->second.access = flags;
    return mprotect(at, bytes, flags == kRead ? PROT_READ : PROT_READ | PROT_WRITE)
               ? kInvalidValue : 0;
}
Result cuMemUnmap(char* at, size_t bytes) {
    if (Result bad = checked()) return bad;
    finish_all();
    std::lock_guard<std::mutex> held(lock);
    auto found = mappings.find(at);
    if (found == mappings.end() || found->second.bytes != bytes) return kInvalidValue;
    close(found->second.file);
    mappings.erase(found);
    mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return 0;
}
Result cuMemHostRegister(char* address, size_t bytes, unsigned flags) {
    if (Result bad = checked()) return bad;
    const char* wanted = std::getenv("FAKE_LOCK_RESULT");
    if (wanted && std::atoi(wanted)) return std::atoi(wanted);
    bool read_only = flags & 8;
    if (flags & ~0x9u || !bytes || !mapped_in_full(address, bytes, !read_only)) return kInvalidValue;
    if (read_only && variable("FAKE_LOCKS_READ_ONLY", "0") == "0") return kNotSupported;
    std::lock_guard<std::mutex> held(lock_of_registered);
    for (const auto& [start, length] : registered)
        if (start < address + bytes && address < start + length) return kRegistered;
    registered[address] = bytes;
    return 0;
}
Result cuMemHostUnregister(char* address) {
    if (Result bad = checked()) return bad;
    if (variable("FAKE_UNLOCK_WAITS", "1") != "0") finish_all();
    std::lock_guard<std::mutex> held(lock_of_registered);
    return registered.erase(address) ? 0 : kNotRegistered;
}
}
