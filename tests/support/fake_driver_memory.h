// Memory of tests/support/fake_driver.cpp: what processes share by descriptors, plain allocations, and
// host memory that is page-locked. Shared memory is a memfd.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <map>

static const size_t kMemory = size_t(1) << 40, kGranule = size_t(2) << 20;
static const int kPinned = 1, kByDescriptor = 1, kRead = 1, kReadWrite = 3;

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
};
struct Mapping {
    int file;  // -1: a plain allocation
    size_t bytes;
    int access;
    bool own;
};
static std::map<char*, Mapping> mappings;
static std::map<char*, size_t> reserved, registered;
static std::map<uint64_t, Memory> handles;

static uint64_t handle_of(int file, size_t bytes, bool own) {
    static uint64_t last;
    handles[++last] = {file, bytes, own};
    return last;
}
static bool on_device(const char* address, size_t bytes, int access = kRead) {
    auto after = mappings.upper_bound(const_cast<char*>(address));
    if (after == mappings.begin()) return false;
    const auto& [start, known] = *--after;
    return address + bytes <= start + known.bytes && (known.access & access) == access;
}

extern "C" {
Result cuMemAlloc(char** out, size_t bytes) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    void* there = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (there == MAP_FAILED) return kOutOfMemory;
    mappings[*out = static_cast<char*>(there)] = {-1, bytes, kReadWrite, true};
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
Result cuMemGetAllocationGranularity(size_t* out, const AllocationProp*, int) {
    *out = kGranule;
    return checked();
}
Result cuMemCreate(uint64_t* out, size_t bytes, const AllocationProp* wanted, uint64_t flags) {
    if (Result bad = checked()) return bad;
    if (wanted->type != kPinned || wanted->handle_types != kByDescriptor || flags ||
        wanted->location.type != 1 || wanted->location.id >= kDevices || wanted->rdma != 1 ||
        !bytes || bytes % kGranule)
        return kInvalidValue;
    if (bytes > kMemory) return kOutOfMemory;
    std::lock_guard<std::mutex> held(lock);
    int file = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) return kOutOfMemory;
    *out = handle_of(file, bytes, true);
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
    *out = handle_of(dup(found->second.file), found->second.bytes, found->second.own);
    return 0;
}
Result cuMemExportToShareableHandle(int* out, uint64_t handle, int type, uint64_t flags) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = handles.find(handle);
    if (found == handles.end() || type != kByDescriptor || flags) return kInvalidValue;
    *out = dup(found->second.file);
    return *out < 0 ? kOutOfMemory : 0;
}
Result cuMemImportFromShareableHandle(uint64_t* out, void* descriptor, int type) {
    if (Result bad = checked()) return bad;
    int file = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
    struct stat about;
    if (type != kByDescriptor || fstat(file, &about) || fcntl(file, F_GET_SEALS) < 0 ||
        about.st_size % kGranule)
        return kInvalidValue;
    std::lock_guard<std::mutex> held(lock);
    for (const auto& [start, mapping] : mappings) {  // nothing promises it within one process
        struct stat own;
        if (mapping.own && mapping.file >= 0 && !fstat(mapping.file, &own) &&
            own.st_ino == about.st_ino)
            return kNotPermitted;
    }
    *out = handle_of(dup(file), about.st_size, false);
    return 0;
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
    mappings[at] = {file, bytes, 0, found->second.own};
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
    if (flags & ~0x9u) return kInvalidValue;
    std::lock_guard<std::mutex> held(lock);
    for (const auto& [start, length] : registered)
        if (start < address + bytes && address < start + length) return kRegistered;
    registered[address] = bytes;
    return 0;
}
Result cuMemHostUnregister(char* address) {
    if (Result bad = checked()) return bad;
    finish_all();
    std::lock_guard<std::mutex> held(lock);
    return registered.erase(address) ? 0 : kNotRegistered;
}
}
