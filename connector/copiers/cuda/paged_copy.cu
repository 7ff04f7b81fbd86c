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

// How a thread goes on from one of its words to the next one, `blockDim.x` words later: what it
// adds always, and what more when its channel or its token begins anew. Divisions are made here,
// once for a chunk, and none for a word.
struct Step {
    unsigned channels, tokens;    // added to the place within a token, and within a head
    long long engine, payload;    // added to both addresses, in bytes
    long long engine_next_token;  // more, when the word is in a token further on
    long long engine_next_head, payload_next_head;
};

// Both are taken by value: through pointers every stride would be loaded again after each store.
template <typename Word, bool kGather>
__device__ void copy_chunk(const Layer layer, const Page page, const Shape& shape,
                           unsigned layer_number, unsigned first) {
    const unsigned channels = shape.channel_words, tokens = shape.page_tokens;
    const unsigned words = page.heads * tokens * channels;
    const unsigned end = words < first + kWordsPerChunk ? words : first + kWordsPerChunk;
    unsigned word = first + threadIdx.x;
    if (word >= end) return;

    const long long token_bytes = static_cast<long long>(channels) * sizeof(Word);
    const long long head_bytes = token_bytes * shape.payload_tokens;
    const unsigned row = word / channels, head = row / tokens;
    unsigned channel = word - row * channels, token = row - head * tokens;
    char* in_engine = reinterpret_cast<char*>(layer.base) + page.block * layer.block_stride +
                      (page.head + head) * layer.head_stride + token * layer.token_stride +
                      channel * sizeof(Word);
    char* in_payload = reinterpret_cast<char*>(page.packed) +
                       (static_cast<long long>(layer_number) * page.heads + head) * head_bytes +
                       (page.token + token) * token_bytes + channel * sizeof(Word);

    const unsigned rows = blockDim.x / channels, heads = rows / tokens;
    const unsigned more_channels = blockDim.x - rows * channels;
    const unsigned more_tokens = rows - heads * tokens;
    const Step step = {
        more_channels,
        more_tokens,
        heads * layer.head_stride + more_tokens * layer.token_stride +
            static_cast<long long>(more_channels * sizeof(Word)),
        heads * head_bytes + more_tokens * token_bytes +
            static_cast<long long>(more_channels * sizeof(Word)),
        layer.token_stride - token_bytes,
        layer.head_stride - tokens * layer.token_stride,
        head_bytes - tokens * token_bytes,
    };

    while (word < end) {
        Word held[kInFlight];
        char* targets[kInFlight];
#pragma unroll
        for (unsigned k = 0; k < kInFlight; ++k) {
            targets[k] = kGather ? in_payload : in_engine;
            if (word + k * blockDim.x < end)
                held[k] = *reinterpret_cast<const Word*>(kGather ? in_engine : in_payload);
            channel += step.channels;
            token += step.tokens;
            in_engine += step.engine;
            in_payload += step.payload;
            if (channel >= channels) {
                channel -= channels;
                ++token;
                in_engine += step.engine_next_token;
            }
            if (token >= tokens) {
                token -= tokens;
                in_engine += step.engine_next_head;
                in_payload += step.payload_next_head;
            }
        }
#pragma unroll
        for (unsigned k = 0; k < kInFlight; ++k) {
            if (word + k * blockDim.x < end) *reinterpret_cast<Word*>(targets[k]) = held[k];
        }
        word += kInFlight * blockDim.x;
    }
}

// The grid may be of any size: few blocks leave the device to the engine.
template <typename Word, bool kGather>
__device__ void copy_pages(const Layer* layers, const Page* pages, const Shape& shape) {
    const unsigned per_page = shape.layers * shape.chunks;
    const unsigned tasks = per_page * shape.pages;
    for (unsigned task = blockIdx.x; task < tasks; task += gridDim.x) {
        const unsigned page = task / per_page, part = task - page * per_page;
        const unsigned layer = part / shape.chunks;
        copy_chunk<Word, kGather>(layers[layer], pages[page], shape, layer,
                                  (part - layer * shape.chunks) * kWordsPerChunk);
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
