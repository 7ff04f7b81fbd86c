/* Included before block_writes.c, it makes every store that others may see at once a slow one, so
 * that another process does see what is there between two of them. */
extern int usleep(unsigned microseconds);
#define __atomic_store_n(place, value, order)                   \
    do {                                                        \
        __typeof__(*(place)) stored = (__typeof__(*(place)))(value); \
        usleep(20);                                             \
        __atomic_store((place), &stored, (order));              \
    } while (0)
