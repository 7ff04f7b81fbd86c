// The kernel's own text as C++: threads take their turns one after the other.

#include <cstring>

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

#define __device__
#define __global__
#include PAGED_COPY_CU

using Kernel = void (*)(const Layer*, const Page*, Shape);
static const struct {
    const char* name;
    Kernel kernel;
} kKernels[] = {
    {"gather16", gather16}, {"gather8", gather8},   {"gather4", gather4},
    {"gather2", gather2},   {"gather1", gather1},   {"scatter16", scatter16},
    {"scatter8", scatter8}, {"scatter4", scatter4}, {"scatter2", scatter2},
    {"scatter1", scatter1},
};

// Returns 0, or 1 when there is no such kernel.
extern "C" int run(const char* name, unsigned blocks, unsigned threads, const Layer* layers,
                   const Page* pages, const Shape* shape) {
    for (const auto& entry : kKernels) {
        if (std::strcmp(entry.name, name) != 0) continue;
        gridDim.x = blocks;
        blockDim.x = threads;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
                entry.kernel(layers, pages, *shape);
        return 0;
    }
    return 1;
}
