// Memory of tests/support/fake_driver.cpp: allocations that other processes open, and host memory that
// is page-locked. An allocation is a file, its handle the file's name.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

static const size_t kMemory = size_t(1) << 40;

struct Allocation {
    std::string name;  // of the file in $FAKE_CUDA_MEMORY that it is
    size_t bytes;
    int opened;  // 0: our own
};
struct Handle {
    char name[64];
};
static std::map<char*, Allocation> allocations;
static std::map<char*, size_t> registered;

static std::string path_of(const std::string& name) {
    return std::string(std::getenv("FAKE_CUDA_MEMORY")) + "/" + name;
}
static Result map_file(int file, const Allocation& made, char** out) {
    void* there = mmap(nullptr, made.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (there == MAP_FAILED) return kOutOfMemory;
    *out = static_cast<char*>(there);
    allocations[*out] = made;
    return 0;
}
static bool on_device(const char* address, size_t bytes) {
    auto after = allocations.upper_bound(const_cast<char*>(address));
    if (after == allocations.begin()) return false;
    const auto& [start, known] = *--after;
    return address + bytes <= start + known.bytes;
}

extern "C" {
Result cuMemAlloc(char** out, size_t bytes) {
    if (Result bad = checked()) return bad;
    if (!bytes) return kInvalidValue;
    if (bytes > kMemory) return kOutOfMemory;
    static int count;
    std::lock_guard<std::mutex> held(lock);
    std::string name = std::to_string(getpid()) + "." + std::to_string(++count);
    int file = open(path_of(name).c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, bytes)) return kOutOfMemory;
    return map_file(file, {name, bytes, 0}, out);
}
Result cuMemFree(char* address) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = allocations.find(address);
    if (found == allocations.end() || found->second.opened) return kInvalidValue;
    unlink(path_of(found->second.name).c_str());
    munmap(address, found->second.bytes);
    allocations.erase(found);
    return 0;
}
Result cuIpcGetMemHandle(Handle* handle, char* address) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = allocations.find(address);
    if (found == allocations.end()) return kInvalidValue;
    std::memset(handle, 0, sizeof *handle);
    std::snprintf(handle->name + 1, 63, "%s", found->second.name.c_str());  // begins with a zero
    return 0;
}
Result cuIpcOpenMemHandle(char** out, Handle handle, unsigned flags) {
    if (Result bad = checked()) return bad;
    if (flags != 1) return kInvalidValue;
    std::string name(handle.name + 1, strnlen(handle.name + 1, 63));
    std::lock_guard<std::mutex> held(lock);
    for (auto& [address, known] : allocations)
        if (known.name == name) {
            if (!known.opened) return kInvalidContext;
            ++known.opened;
            *out = address;
            return 0;
        }
    int file = open(path_of(name).c_str(), O_RDWR);
    struct stat about;
    if (file < 0 || fstat(file, &about) || !about.st_size) return kInvalidHandle;
    return map_file(file, {name, static_cast<size_t>(about.st_size), 1}, out);
}
Result cuIpcCloseMemHandle(char* address) {
    if (Result bad = checked()) return bad;
    std::lock_guard<std::mutex> held(lock);
    auto found = allocations.find(address);
    if (found == allocations.end() || !found->second.opened) return kInvalidValue;
    if (--found->second.opened) return 0;
    munmap(address, found->second.bytes);
    allocations.erase(found);
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
    std::lock_guard<std::mutex> held(lock);
    return registered.erase(address) ? 0 : kNotRegistered;
}
}
