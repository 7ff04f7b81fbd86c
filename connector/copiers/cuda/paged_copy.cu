// Copies between an engine's paged KV and packed payloads laid out [layer][head][token][C].
//
// Compiled at run time by NVRTC, so it includes nothing. The tests compile the same text as
// C++ and run it on the host: no thread may rely on another one.

// One layer of the engine's KV: where [block 0][head 0][token 0] is, and strides, in bytes.
struct Layer {
    unsigned long long base;
    long long block_stride;
    long long head_stride;
    long long token_stride;
};

// One engine block and its place in a payload. Rows of plan.PAGE.
struct Page {
    unsigned long long packed;  // address of the payload's part that is copied
    long long block;            // its number in the engine's KV
    unsigned token;             // its first token's place in the payload
    unsigned head;              // the engine's head that takes the payload's first one
    unsigned heads;             // of the payload
    unsigned unused;
};

struct Shape {
    unsigned layers;
    unsigned pages;
    unsigned payload_tokens;
    unsigned page_tokens;
    unsigned channel_words;  // words of one token and head
    unsigned chunks;         // parts that the words of one page and layer are divided into
};

constexpr unsigned kWordsPerChunk = 4096;
constexpr unsigned kInFlight = 4;  // loads of a thread before its first store

template <typename Word, bool kGather>
__device__ void copy_chunk(const Layer& layer, const Page& page, const Shape& shape,
                           unsigned layer_number, unsigned first) {
    const unsigned words = page.heads * shape.page_tokens * shape.channel_words;
    const unsigned end = words < first + kWordsPerChunk ? words : first + kWordsPerChunk;
    char* paged = reinterpret_cast<char*>(layer.base) + page.block * layer.block_stride +
                  page.head * layer.head_stride;
    Word* packed = reinterpret_cast<Word*>(page.packed) +
                   (static_cast<unsigned long long>(layer_number) * page.heads *
                        shape.payload_tokens + page.token) * shape.channel_words;

    for (unsigned start = first + threadIdx.x; start < end; start += kInFlight * blockDim.x) {
        Word held[kInFlight];
        Word* targets[kInFlight];
#pragma unroll
        for (unsigned k = 0; k < kInFlight; ++k) {
            const unsigned word = start + k * blockDim.x;
            if (word >= end) continue;
            const unsigned row = word / shape.channel_words;
            const unsigned channel = word - row * shape.channel_words;
            const unsigned head = row / shape.page_tokens;
            const unsigned token = row - head * shape.page_tokens;
            Word* in_engine = reinterpret_cast<Word*>(
                paged + head * layer.head_stride + token * layer.token_stride) + channel;
            Word* in_payload = packed +
                (static_cast<unsigned long long>(head) * shape.payload_tokens + token) *
                    shape.channel_words + channel;
            held[k] = kGather ? *in_engine : *in_payload;
            targets[k] = kGather ? in_payload : in_engine;
        }
#pragma unroll
        for (unsigned k = 0; k < kInFlight; ++k) {
            if (start + k * blockDim.x < end) *targets[k] = held[k];
        }
    }
}

// The grid may be of any size: few blocks leave the device to the engine.
template <typename Word, bool kGather>
__device__ void copy_pages(const Layer* layers, const Page* pages, const Shape& shape) {
    const unsigned long long per_page =
        static_cast<unsigned long long>(shape.layers) * shape.chunks;
    const unsigned long long tasks = per_page * shape.pages;
    for (unsigned long long task = blockIdx.x; task < tasks; task += gridDim.x) {
        const unsigned part = static_cast<unsigned>(task % per_page);
        const unsigned layer = part / shape.chunks;
        copy_chunk<Word, kGather>(layers[layer], pages[task / per_page], shape, layer,
                                  part % shape.chunks * kWordsPerChunk);
    }
}

#define PAGED_COPY(bytes, Word)                                                               \
    extern "C" __global__ void gather##bytes(const Layer* layers, const Page* pages,          \
                                             Shape shape) {                                   \
        copy_pages<Word, true>(layers, pages, shape);                                         \
    }                                                                                         \
    extern "C" __global__ void scatter##bytes(const Layer* layers, const Page* pages,         \
                                              Shape shape) {                                  \
        copy_pages<Word, false>(layers, pages, shape);                                        \
    }

PAGED_COPY(16, uint4)
PAGED_COPY(8, unsigned long long)
PAGED_COPY(4, unsigned int)
PAGED_COPY(2, unsigned short)
PAGED_COPY(1, unsigned char)
