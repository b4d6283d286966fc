/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the order of memory away: then the thread sanitizer must find races. */
#include <stdatomic.h>
#define memory_order_acquire memory_order_relaxed
#define memory_order_seq_cst memory_order_relaxed
