/* The CRC-32 of zlib, eight bytes at a time: of headers and records, whose bytes are multiples of
 * four. Part of each source that includes it; `fill_crc_tables` comes first. */
#include <stdint.h>
#include <string.h>

static uint32_t crc_tables[8][256];

static void fill_crc_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_tables[0][i] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (int i = 0; i < 256; i++) {
            uint32_t before = crc_tables[table - 1][i];
            crc_tables[table][i] = before >> 8 ^ crc_tables[0][before & 0xFF];
        }
}

/* Goes on with the CRC-32 `crc` of what came before, as zlib's does. */
static uint32_t crc32_of(uint32_t crc, const void *bytes, int words) {
    crc = ~crc;
    for (int i = 0; i < words; i++) {
        uint64_t w;
        memcpy(&w, (const char *)bytes + 8 * i, sizeof w);
        w ^= crc;
        crc = crc_tables[7][w & 0xFF] ^ crc_tables[6][w >> 8 & 0xFF] ^
              crc_tables[5][w >> 16 & 0xFF] ^ crc_tables[4][w >> 24 & 0xFF] ^
              crc_tables[3][w >> 32 & 0xFF] ^ crc_tables[2][w >> 40 & 0xFF] ^
              crc_tables[1][w >> 48 & 0xFF] ^ crc_tables[0][w >> 56];
    }
    return ~crc;
}
